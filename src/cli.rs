//! The command line: what can be said, and the exit codes.
//!
//! Commands that talk to a running daemon are in `cli/remote`; `serve`, `rebuild`, `adopt` and
//! `doctor` go through `Hooks`, which `main` fills, so that this module knows nothing of the daemon.

mod remote;
mod show;

use crate::config::Config;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// How long the paths of the storage are looked at, at most.
const STORAGE_PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// The operation failed.
    Failed = 1,
    /// Usage or configuration.
    Usage = 2,
    /// The daemon can't be reached.
    Unreachable = 3,
    /// Not found.
    NotFound = 4,
    /// Conflict.
    Conflict = 5,
    /// Timed out waiting.
    TimedOut = 6,
    /// The supervisor should start it again.
    RestartMe = 75,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit as u8)
    }
}

/// What `main` plugs in.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    /// `volward serve`.
    pub serve: fn(&ServeArgs, Config) -> Exit,
    /// `volward rebuild`.
    pub rebuild: fn(&RebuildArgs, Config) -> Exit,
    /// `volward adopt`.
    pub adopt: fn(&AdoptArgs, Config) -> Exit,
    /// `volward doctor`, with the arguments behind it.
    pub doctor: fn(&[String]) -> Exit,
}

/// Provisions and deletes block volumes on storage hosts, and never stalls.
#[derive(Debug, Parser)]
#[command(name = "volward", version, propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// The API: a socket path or a URL
    #[arg(
        long,
        global = true,
        env = "VOLWARD_API",
        default_value = "/run/volward/api.sock"
    )]
    pub api: String,
    /// The file with the token of an API on TCP
    #[arg(long, global = true, env = "VOLWARD_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// For people or for programs
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon
    Serve(ServeArgs),
    /// Check a configuration file and the paths it names
    CheckConfig(ConfigArgs),
    /// Volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Snapshots
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Deleted volumes that can still be restored
    #[command(subcommand)]
    Trash(TrashCommand),
    /// Make the records again from the images' own metadata
    Rebuild(RebuildArgs),
    /// Take an existing image under volward's care
    Adopt(AdoptArgs),
    /// What happened
    Events(EventsArgs),
    /// How the daemon is
    Status(StatusArgs),
    /// Find stale mounts, hung devices and stuck volumes on this host
    #[command(disable_help_flag = true)]
    Doctor {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Print completions for a shell
    Completions { shell: clap_complete::Shell },
    /// Print the manual page
    Man,
}

/// Where the configuration is.
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    /// The configuration file
    #[arg(long, default_value = "/etc/volward/volward.toml")]
    pub config: PathBuf,
}

/// `volward serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// The configuration file.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Use a state file that was made on another machine
    #[arg(long)]
    pub take_over: bool,
}

/// `volward rebuild`.
#[derive(Debug, Clone, Args)]
pub struct RebuildArgs {
    /// The configuration file.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Also take the images of this instance
    #[arg(long)]
    pub instance: Option<String>,
    /// Do it; without this, only say what would be done
    #[arg(long)]
    pub apply: bool,
}

/// `volward adopt`.
#[derive(Debug, Clone, Args)]
pub struct AdoptArgs {
    /// The configuration file.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The image: a path, or POOL/IMAGE
    pub image: String,
    /// The name that it gets
    #[arg(long)]
    pub name: crate::model::Name,
    /// The class that it gets
    #[arg(long)]
    pub class: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct WaitArgs {
    /// Wait until it is settled, at most so long
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "10m", value_parser = duration)]
    pub wait: Option<u64>,
}

fn duration(text: &str) -> Result<u64, String> {
    crate::duration::parse_duration(text).map_err(|error| error.to_string())
}

fn label(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or("a label looks like key=value")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume
    Create {
        name: String,
        /// Such as 10GiB
        #[arg(long)]
        size: Option<String>,
        #[arg(long)]
        class: Option<String>,
        /// Clone this snapshot
        #[arg(long, group = "source")]
        from_snapshot: Option<String>,
        /// Clone this volume
        #[arg(long, group = "source")]
        from_volume: Option<String>,
        /// Import this file of the daemon's host
        #[arg(long, group = "source", requires = "format")]
        from_file: Option<String>,
        /// The format of the file: raw or qcow2
        #[arg(long)]
        format: Option<String>,
        #[arg(long)]
        iops: Option<u64>,
        #[arg(long)]
        bytes_per_second: Option<String>,
        /// Encrypt with this key
        #[arg(long)]
        key_id: Option<String>,
        #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Show a volume
    Get {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// List volumes
    List(ListArgs),
    /// Grow a volume
    Resize {
        name: String,
        size: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Delete a volume; it stays in the trash for a while
    Delete {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Try a failed or waiting volume now
    Retry {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Snapshot a volume
    Create {
        name: String,
        #[arg(long)]
        volume: String,
        #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Show a snapshot
    Get {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// List snapshots
    List(ListArgs),
    /// Delete a snapshot
    Delete {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Try a failed or waiting snapshot now
    Retry {
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TrashCommand {
    /// List what can be restored
    List,
    /// Undo a deletion
    Restore {
        uid: String,
        /// Under another name
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Free the space now; it can't be restored any more
    Purge { uid: String },
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ListArgs {
    #[arg(long)]
    pub phase: Option<String>,
    #[arg(long)]
    pub class: Option<String>,
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub label: Option<(String, String)>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EventsArgs {
    /// Go on as things happen
    #[arg(long)]
    pub follow: bool,
    /// After this number
    #[arg(long)]
    pub after: Option<u64>,
    /// Of this object only, such as volume/db-01
    #[arg(long)]
    pub object: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct StatusArgs {
    /// Show it again every two seconds
    #[arg(long)]
    pub watch: bool,
}

/// Reads the command line of this process and does what it says.
#[must_use]
pub fn run(hooks: &Hooks) -> Exit {
    match Cli::try_parse() {
        Ok(cli) => dispatch(cli, hooks),
        Err(error) => {
            let done = !error.use_stderr();
            // Nobody is left to tell when this fails.
            let _ = error.print();
            if done { Exit::Done } else { Exit::Usage }
        }
    }
}

fn dispatch(cli: Cli, hooks: &Hooks) -> Exit {
    let remote =
        |run: &dyn Fn(&remote::Remote) -> Result<(), remote::Failure>| match remote::Remote::new(
            &cli.global,
        )
        .and_then(|remote| run(&remote))
        {
            Ok(()) => Exit::Done,
            Err(failure) => {
                eprintln!("volward: {}", show::clean(&failure.message));
                failure.exit
            }
        };
    match &cli.command {
        Command::Serve(args) => with_config(&args.config, |config| (hooks.serve)(args, config)),
        Command::Rebuild(args) => with_config(&args.config, |config| (hooks.rebuild)(args, config)),
        Command::Adopt(args) => with_config(&args.config, |config| (hooks.adopt)(args, config)),
        Command::CheckConfig(args) => with_config(args, |_| {
            println!("{}: ok", args.config.display());
            Exit::Done
        }),
        Command::Doctor { args } => (hooks.doctor)(args),
        Command::Volume(command) => remote(&|remote| remote.volume(command)),
        Command::Snapshot(command) => remote(&|remote| remote.snapshot(command)),
        Command::Trash(command) => remote(&|remote| remote.trash(command)),
        Command::Events(args) => remote(&|remote| remote.events(args)),
        Command::Status(args) => remote(&|remote| remote.status(args)),
        Command::Completions { shell } => {
            clap_complete::generate(
                *shell,
                &mut Cli::command(),
                "volward",
                &mut std::io::stdout(),
            );
            Exit::Done
        }
        Command::Man => {
            match clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout()) {
                Ok(()) => Exit::Done,
                Err(_) => Exit::Failed,
            }
        }
    }
}

/// Loads the configuration and looks at the paths it names.
fn with_config(args: &ConfigArgs, run: impl FnOnce(Config) -> Exit) -> Exit {
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error}");
            return Exit::Usage;
        }
    };
    let mut faults = config.check_paths();
    faults.extend(storage_faults(&config));
    for fault in &faults {
        eprintln!("{}: {fault}", args.config.display());
    }
    if faults.is_empty() {
        run(config)
    } else {
        Exit::Usage
    }
}

/// Looks at the paths of the storage for a moment only: one that hangs must not keep the daemon
/// from starting, which then says by itself what it can't reach.
fn storage_faults(config: &Config) -> Vec<String> {
    let (tell, told) = crossbeam::channel::bounded(1);
    let looked_at = config.clone();
    let spawned = crate::spawn::spawn("check-paths", 256 << 10, move || {
        // Nobody listens any more if it took too long.
        let _ = tell.try_send(looked_at.check_storage_paths());
    });
    if spawned.is_err() {
        return Vec::new();
    }
    told.recv_timeout(STORAGE_PATIENCE).unwrap_or_else(|_| {
        let seconds = STORAGE_PATIENCE.as_secs();
        eprintln!("the paths of the storage don't answer within {seconds} s; going on without");
        Vec::new()
    })
}
