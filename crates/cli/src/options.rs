//! The options that every command has.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::times::duration;

const GLOBAL: &str = "Global options";

/// The global options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The URL of the store
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// A calicoctl.cfg; else /etc/calico/calicoctl.cfg if it is there
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "FILE", conflicts_with = "store")]
    pub(crate) config: Option<PathBuf>,

    /// Answer as table, wide, yaml or json
    #[arg(short, long, global = true, help_heading = GLOBAL, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    #[arg(hide_possible_values = true)]
    pub(crate) output: Format,

    /// Where the networks are
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR", default_value = datastore::DEFAULT_CONF_DIR)]
    pub(crate) cni_conf_dir: PathBuf,

    /// The log level, off to trace
    #[arg(short, long, global = true, help_heading = GLOBAL, value_enum, default_value_t = LogLevel::Warn, value_name = "LEVEL")]
    #[arg(hide_possible_values = true)]
    pub(crate) log_level: LogLevel,

    /// Longest wait for a store in use [default: 30s]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "TIME", value_parser = duration)]
    pub(crate) lock_timeout: Option<Duration>,

    /// Accepted because scripts for calicoctl give it, and ignored: Margay does not compare versions
    #[arg(long = "allow-version-mismatch", global = true, hide = true)]
    _allow_version_mismatch: bool,
}

// The values say enough by themselves: a doc comment on a variant would blow up every help text.

/// How an answer is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    #[value(alias = "ps")]
    Table,
    Wide,
    #[value(alias = "yml")]
    Yaml,
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}
