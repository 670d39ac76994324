//! Where log lines go: standard error, one line each, with the journal's priorities if systemd
//! reads them.

use log::{Level, LevelFilter};
use std::io::Write;

/// Starts logging; a second call only sets the level.
pub fn start(level: LevelFilter) {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let mut builder = env_logger::Builder::new();
    // Everything passes here; `log::set_max_level` decides, also after a reload.
    builder.filter_level(LevelFilter::Trace);
    builder.format(move |to, record| {
        let level = record.level();
        // One line each, whatever is in the message.
        let words = record.args().to_string().replace(['\n', '\r'], " ");
        if journal {
            writeln!(to, "<{}>{words}", priority(level))
        } else {
            let now = jiff::Timestamp::now();
            writeln!(to, "{now:.3} {:5} {words}", level.as_str())
        }
    });
    let _started_already = builder.try_init();
    log::set_max_level(level);
}

/// syslog(3)'s priorities.
fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}
