//! The binary: read the command line, run, end with the right code.

use std::process::ExitCode;
use volward::cli::{Exit, Hooks, run};

fn missing(what: &str) -> Exit {
    eprintln!("volward: {what} is not part of this build");
    Exit::Failed
}

fn main() -> ExitCode {
    let hooks = Hooks {
        serve: |args, config| volward::daemon::serve(args, config),
        rebuild: |args, config| volward::daemon::rebuild(args, config),
        adopt: |_, _| missing("adopt"),
        doctor: |_| missing("doctor"),
    };
    run(&hooks).into()
}
