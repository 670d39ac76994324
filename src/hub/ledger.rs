//! Session addresses, made durable by the loop before a session is used.

use super::{Hub, Word};
use crate::backend::{Error, Ledger, Result};
use crate::model::ErrorKind;
use crate::store::{Store, StoreError};
use crossbeam::channel::{Sender, bounded};
use std::sync::OnceLock;
use std::time::Duration;

/// How long a session waits for its address to become durable, at most.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a session asks of the store.
#[derive(Debug, Clone)]
pub enum Wish {
    /// Make it durable.
    Opened { domain: String, address: String },
    /// Which earlier ones may still act?
    Predecessors { domain: String },
    /// It can't act any more.
    Closed { domain: String, address: String },
}

/// A wish and whom to tell. The answer goes out after the commit.
#[derive(Debug)]
pub struct Call {
    pub wish: Wish,
    pub answer: Sender<std::result::Result<Vec<String>, String>>,
}

impl Wish {
    /// Writes to the open transaction, or reads from it.
    pub fn apply(&self, store: &mut Store) -> std::result::Result<Vec<String>, StoreError> {
        match self {
            Wish::Opened { domain, address } => {
                store.session_opened(domain, address)?;
                Ok(Vec::new())
            }
            Wish::Closed { domain, address } => {
                store.session_closed(domain, address)?;
                Ok(Vec::new())
            }
            Wish::Predecessors { domain } => store.predecessors(domain),
        }
    }
}

/// The ledger that backends get; it is connected to the hub once there is one.
#[derive(Debug, Default)]
pub struct DaemonLedger {
    hub: OnceLock<Hub>,
}

impl DaemonLedger {
    pub fn connect(&self, hub: Hub) {
        // Connected once, at the start of the daemon.
        let _ = self.hub.set(hub);
    }

    fn call(&self, wish: Wish) -> Result<Vec<String>> {
        let lost = |words: &str| Error::new(ErrorKind::Transient, "ledger", words).untouched();
        let hub = self
            .hub
            .get()
            .ok_or_else(|| lost("the daemon isn't up yet"))?;
        let (answer, answered) = bounded(1);
        if !hub.tell(Word::Session(Call { wish, answer })) {
            return Err(lost("the daemon ends"));
        }
        match answered.recv_timeout(PATIENCE) {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(words)) => Err(lost(&words)),
            Err(_) => Err(lost(
                "the address of a session could not be made durable in time",
            )),
        }
    }
}

impl Ledger for DaemonLedger {
    fn opened(&self, domain: &str, address: &str) -> Result<()> {
        let (domain, address) = (domain.to_owned(), address.to_owned());
        self.call(Wish::Opened { domain, address }).map(drop)
    }

    fn predecessors(&self, domain: &str) -> Result<Vec<String>> {
        self.call(Wish::Predecessors {
            domain: domain.to_owned(),
        })
    }

    fn closed(&self, domain: &str, address: &str) -> Result<()> {
        let (domain, address) = (domain.to_owned(), address.to_owned());
        self.call(Wish::Closed { domain, address }).map(drop)
    }
}
