//! Long polls without threads.
//!
//! This file knows who waits for what; the requests themselves rest with the poll thread of their
//! front. The order that loses no wake-up: the responder thread *registers*, then reads the
//! store, then parks. The loop thread *commits*, then wakes. So either the reader sees the commit,
//! or the ticket was there to be woken.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::front::bell::Bell;
use super::front::{Request, Responder};

/// What a waiting request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A change of the object with this uid.
    Object(u128),
    /// Any new event.
    Events,
}

const REGISTERED: u8 = 0;
const PARKED: u8 = 1;
const WOKEN: u8 = 2;

#[derive(Debug)]
struct Waiter {
    state: AtomicU8,
    bell: OnceLock<Arc<Bell>>,
}

impl Waiter {
    fn wake(&self) {
        if self.state.swap(WOKEN, Ordering::SeqCst) == PARKED
            && let Some(bell) = self.bell.get()
        {
            bell.ring_for_parked();
        }
    }
}

#[derive(Debug, Default)]
struct Hub {
    /// How many (key, waiter) pairs are registered: all that `wake` reads when nobody waits.
    registered: AtomicUsize,
    waiters: Mutex<HashMap<Key, Vec<Arc<Waiter>>>>,
}

impl Hub {
    fn waiters(&self) -> MutexGuard<'_, HashMap<Key, Vec<Arc<Waiter>>>> {
        // Every change under this lock is one map operation: there is no half-done state.
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hub of those who wait; cheap to clone, shared by all fronts and the loop thread.
#[derive(Debug, Clone, Default)]
pub struct Park {
    hub: Arc<Hub>,
}

impl Park {
    /// A hub where nobody waits.
    #[must_use]
    pub fn new() -> Park {
        Park::default()
    }

    /// To be called *before* the store is read. Dropping the ticket unregisters it.
    #[must_use]
    pub fn register(&self, keys: &[Key]) -> Ticket {
        let waiter = Arc::new(Waiter {
            state: AtomicU8::new(REGISTERED),
            bell: OnceLock::new(),
        });
        {
            let mut waiters = self.hub.waiters();
            for key in keys {
                waiters.entry(*key).or_default().push(Arc::clone(&waiter));
            }
        }
        self.hub.registered.fetch_add(keys.len(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ticket {
            hub: Arc::clone(&self.hub),
            keys: keys.to_vec(),
            waiter,
        }
    }

    /// Lays the request down until a key of the ticket is woken (it may have been already) or the
    /// deadline comes; then the handler gets it again, at the deadline with `last_call` set.
    /// Holds no thread. When the client goes, so does the request.
    pub fn park(&self, ticket: Ticket, request: Request, responder: Responder, deadline: Instant) {
        responder.park(ticket, request, deadline);
    }

    /// Wakes whoever waits for one of the keys; to be called *after* the commit. One atomic load
    /// when nobody waits; never waits for a client.
    pub fn wake(&self, keys: &[Key]) {
        fence(Ordering::SeqCst);
        if self.hub.registered.load(Ordering::SeqCst) == 0 {
            return;
        }
        let woken: Vec<Arc<Waiter>> = {
            let waiters = self.hub.waiters();
            keys.iter()
                .filter_map(|key| waiters.get(key))
                .flatten()
                .cloned()
                .collect()
        };
        // The bells are rung without the lock.
        for waiter in woken {
            waiter.wake();
        }
    }

    /// How many registrations there are (one per key of each ticket).
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.hub.registered.load(Ordering::SeqCst)
    }
}

/// A place in the hub. `Park::park` takes it; dropping it gives the place back.
#[derive(Debug)]
pub struct Ticket {
    hub: Arc<Hub>,
    keys: Vec<Key>,
    waiter: Arc<Waiter>,
}

impl Ticket {
    /// Whether one of its keys was woken since the registration.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.waiter.state.load(Ordering::SeqCst) == WOKEN
    }

    /// From here on a wake rings that bell (unless it came already: see `is_woken`).
    pub(crate) fn attach(&self, bell: &Arc<Bell>) {
        let _attached_before = self.waiter.bell.set(Arc::clone(bell));
        let _woken_meanwhile = self.waiter.state.compare_exchange(
            REGISTERED,
            PARKED,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut waiters = self.hub.waiters();
        for key in &self.keys {
            if let Some(list) = waiters.get_mut(key) {
                // One entry per occurrence of the key: a repeated key was registered twice.
                if let Some(at) = list
                    .iter()
                    .position(|other| Arc::ptr_eq(other, &self.waiter))
                {
                    list.swap_remove(at);
                }
                if list.is_empty() {
                    waiters.remove(key);
                }
            }
        }
        drop(waiters);
        self.hub
            .registered
            .fetch_sub(self.keys.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_between_registering_and_parking_is_kept() {
        let park = Park::new();
        let ticket = park.register(&[Key::Object(7)]);
        park.wake(&[Key::Object(8), Key::Events]);
        assert!(!ticket.is_woken(), "other keys");
        park.wake(&[Key::Object(7)]);
        assert!(ticket.is_woken());
        ticket.attach(&Arc::new(Bell::new().expect("an eventfd")));
        assert!(ticket.is_woken(), "parking doesn't forget it");
    }

    #[test]
    fn a_wake_after_parking_rings_the_bell() {
        let bell = Arc::new(Bell::new().expect("an eventfd"));
        let park = Park::new();
        let ticket = park.register(&[Key::Events, Key::Object(1)]);
        ticket.attach(&bell);
        assert!(!bell.take_sweep());
        park.wake(&[Key::Events]);
        assert!(bell.take_sweep() && ticket.is_woken());
        park.wake(&[Key::Object(1)]);
        assert!(!bell.take_sweep(), "it rings once");
    }

    #[test]
    fn a_dropped_ticket_leaves_nothing_behind() {
        let park = Park::new();
        let one = park.register(&[Key::Events, Key::Events, Key::Object(1)]);
        let two = park.register(&[Key::Events]);
        assert_eq!(park.waiting(), 4);
        drop(one);
        assert_eq!(park.waiting(), 1);
        drop(two);
        assert_eq!(park.waiting(), 0);
        assert!(park.hub.waiters().is_empty());
    }
}
