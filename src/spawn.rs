//! The one way to start a thread.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

/// Starts a thread with that name and stack size. Its end is always logged: a panic as an error
/// with its message, a normal return at debug level.
///
/// # Errors
/// When the system has no thread to give (EAGAIN at a pid or memory limit).
pub fn spawn(
    name: &str,
    stack_bytes: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let shown = name.to_owned();
    Builder::new()
        .name(name.to_owned())
        .stack_size(stack_bytes)
        .spawn(move || match catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => log::debug!("thread={shown} ended"),
            Err(payload) => {
                log::error!("thread={shown} panicked: {}", panic_text(payload.as_ref()));
            }
        })
}

/// The message of a caught panic.
#[must_use]
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_the_thread_and_nothing_else() {
        let thread = spawn("doomed", 64 << 10, || panic!("boom {}", 1)).expect("a thread");
        assert_eq!(thread.thread().name(), Some("doomed"));
        assert!(thread.join().is_ok(), "the panic was caught inside");
    }
}
