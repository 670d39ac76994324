//! What systemd is told, from a thread of its own: its socket may block when pid 1 is stuck, and
//! that must hold up neither the watchdog nor the loop.

use crate::spawn;
use crossbeam::channel::{Sender, bounded};
use sd_notify::NotifyState;
use std::{fmt, io};

enum Word {
    Ready,
    Feed,
    Status(String),
    Reloading,
    Stopping,
}

/// The line to systemd. Cheap to clone. A word that finds the line busy is dropped.
#[derive(Clone)]
pub struct Systemd {
    words: Sender<Word>,
    every_ms: Option<u64>,
}

impl Systemd {
    /// The line, if the environment has one (`NOTIFY_SOCKET`).
    ///
    /// # Errors
    /// When its thread can't be started.
    pub fn start() -> io::Result<Option<Systemd>> {
        if std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(None);
        }
        let (words, heard) = bounded(16);
        spawn::spawn("systemd", 128 << 10, move || {
            for word in heard {
                if let Err(error) = tell(&word) {
                    log::warn!("systemd can't be told: {error}");
                }
            }
        })?;
        // Half of what is allowed, as sd_watchdog_enabled(3) recommends.
        let every_ms = sd_notify::watchdog_enabled().map(|allowed| {
            u64::try_from(allowed.as_millis() / 2)
                .unwrap_or(u64::MAX)
                .max(1)
        });
        Ok(Some(Systemd { words, every_ms }))
    }

    /// `READY=1`: requests are answered now.
    pub fn ready(&self) {
        self.say(Word::Ready);
    }

    /// `STATUS=`: one line for `systemctl status`.
    pub fn status(&self, line: String) {
        self.say(Word::Status(line));
    }

    /// `RELOADING=1`; `ready` ends it.
    pub fn reloading(&self) {
        self.say(Word::Reloading);
    }

    /// `STOPPING=1`.
    pub fn stopping(&self) {
        self.say(Word::Stopping);
    }

    pub(super) fn feed(&self) {
        self.say(Word::Feed);
    }

    /// How often systemd wants to be fed (`WATCHDOG_USEC` / 2), in milliseconds; `None`: not.
    #[must_use]
    pub fn every_ms(&self) -> Option<u64> {
        self.every_ms
    }

    fn say(&self, word: Word) {
        drop(self.words.try_send(word));
    }
}

impl fmt::Debug for Systemd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Systemd")
            .field("every_ms", &self.every_ms)
            .finish_non_exhaustive()
    }
}

fn tell(word: &Word) -> io::Result<()> {
    match word {
        Word::Ready => sd_notify::notify(&[NotifyState::Ready]),
        Word::Feed => sd_notify::notify(&[NotifyState::Watchdog]),
        Word::Status(line) => sd_notify::notify(&[NotifyState::Status(line)]),
        Word::Reloading => {
            sd_notify::notify(&[NotifyState::Reloading, NotifyState::monotonic_usec_now()?])
        }
        Word::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
    }
}
