//! Runs the commands of `margay`. This module also defines the global options and the three kinds of commands. Before a
//! command runs, this module chooses and opens the command's store. In a dry run, the command's writes stay in memory.
//! After a command, this module closes the store and prints the command's answer: text for people, JSON for programs,
//! and notes on stderr.
//!
//! A command that changes pools also refreshes this machine's NAT rules for pools with `natOutgoing`, unless Felix
//! maintains them. The plugin writes NAT rules of pools only when a container starts. Unless margay refreshes them, the
//! NAT rules of a deleted pool would stay until the next container starts, as they do on the other nodes of a cluster.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::{Args, ValueEnum};
use datastore::{
    ChoiceSource, ChosenStore, ConfigError, ConfigFile, Create, DEFAULT_CONFIG_FILE, Drivers, Environment, Location,
    all_for_operator, for_operator, maintenance, served,
};
use ipam_core::forwarding::{ForwardingOwner, StoreScope};
use ipam_core::model::{ClusterInformation, Pool};
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use kv::wrap::Rehearsal;
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use wiring::masquerade;

use crate::error::{CommandFailure, CommandResult};
use crate::output::{TableRow, run_with_progress, table, yaml};
use crate::store::{DEFAULT_LOCK_TIMEOUT, StoreAccess, StoreUse};
use crate::times::parse_duration;

const GLOBAL_HEADING: &str = "Global options";

/// The options that every command accepts.
#[derive(Debug, Args)]
pub(crate) struct GlobalOptions {
    /// URL of the store to work on
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// Config file [default: /etc/calico/calicoctl.cfg]
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "FILE", conflicts_with = "store")]
    pub(crate) config: Option<PathBuf>,

    /// Output: table, wide, yaml or json
    #[arg(short, long, global = true, help_heading = GLOBAL_HEADING, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    #[arg(hide_possible_values = true)]
    pub(crate) output: Format,

    /// CNI configuration folder
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "DIR", default_value = datastore::DEFAULT_CONF_DIR)]
    pub(crate) cni_conf_dir: PathBuf,

    /// Log level, from off to trace
    #[arg(short, long, global = true, help_heading = GLOBAL_HEADING, value_enum, default_value_t = LogLevel::Warn, value_name = "LEVEL")]
    #[arg(hide_possible_values = true)]
    pub(crate) log_level: LogLevel,

    /// Maximum wait for a locked store [default: 30s]
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "TIME", value_parser = parse_duration)]
    lock_timeout: Option<Duration>,

    /// Ignored; accepted so that scripts written for calicoctl keep working
    #[arg(long = "allow-version-mismatch", global = true, hide = true)]
    _allow_version_mismatch: bool,
}

// The variants of `Format` have no doc comments, because clap would print their doc comments in the help of every
// subcommand.

/// The output format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    #[value(alias = "ps")]
    Table,
    Wide,
    #[value(alias = "yml")]
    Yaml,
    Json,
}

/// The log level, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Default time limit of a command, counted from the moment when the command's store is open.
const DEFAULT_COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of a command that reads all blocks of a store. Reading all blocks can take minutes on a slow disk that is
/// shared with other processes.
pub(crate) const READ_ALL_TIMEOUT: Duration = Duration::from_secs(600);

/// A parsed command that can be run. The variants of `Task` differ in how the command accesses stores.
pub(crate) enum Task<'a> {
    OnOpenStore(&'a dyn OpenStoreCommand),
    OnStore(&'a dyn StoreCommand),
    Standalone(&'a dyn StandaloneCommand),
}

/// A command that runs on one store, which is already open when the command starts.
#[async_trait(?Send)]
pub(crate) trait OpenStoreCommand {
    /// Returns whether the command reads or writes the store, and whether a missing store is created.
    fn store_use(&self) -> StoreUse;

    /// True for a dry run, in which the command makes all of its checks but its writes stay in memory.
    fn dry_run(&self) -> bool {
        false
    }

    /// Returns the time limit of the command, counted from the moment when the store is open.
    fn timeout_after_open(&self) -> Duration {
        if self.store_use() == StoreUse::ReadAll { READ_ALL_TIMEOUT } else { DEFAULT_COMMAND_TIMEOUT }
    }

    /// True if the command may change pools, on which this machine's NAT rules depend.
    fn changes_pools(&self) -> bool {
        false
    }

    /// Refuses arguments that are invalid whatever the store contains; called before the store is opened or created.
    fn check(&self) -> CommandResult<()> {
        Ok(())
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer>;
}

/// A command on one store that opens the store itself, perhaps several times, or that works on the store's files.
#[async_trait(?Send)]
pub(crate) trait StoreCommand {
    /// If the command works only on embedded stores, returns the command's name and what to use on a cluster instead.
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        None
    }

    /// Returns the text of the progress spinner on a terminal, or `None` if the command shows its own progress.
    fn progress_text(&self) -> Option<&'static str> {
        None
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer>;
}

/// A command that uses no store or several stores, or that runs until it is stopped.
pub(crate) trait StandaloneCommand {
    /// Runs the command and returns the exit code of the process.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8>;
}

/// One run of the `margay` program: its options, the store drivers that the program has, its environment and its output
/// streams.
pub(crate) struct Invocation<'a> {
    pub(crate) options: &'a GlobalOptions,
    pub(crate) drivers: &'a Drivers,
    pub(crate) env: &'a Environment<'a>,
    pub(crate) out: &'a mut dyn Write,
    pub(crate) err: &'a mut dyn Write,
}

impl<'a> Invocation<'a> {
    /// Runs a command and returns the exit code of the process.
    pub(crate) fn carry_out(&mut self, task: &Task<'_>) -> CommandResult<u8> {
        match task {
            Task::OnOpenStore(command) => self.run_on_store(&OpeningCommand(*command)),
            Task::OnStore(command) => self.run_on_store(*command),
            Task::Standalone(command) => command.run(self),
        }
    }

    /// Carries out a command on the configured store and prints its answer.
    pub(crate) fn run_on_store(&mut self, command: &dyn StoreCommand) -> CommandResult<u8> {
        let ChosenStore { location, .. } = self.choose()?;
        if let Some((what, instead)) = command.only_embedded(self.drivers).filter(|_| location.is_shared()) {
            return Err(CommandFailure::new(format!("{what} is not for {}", location.facts().name)).hint(instead));
        }
        let at = self.store_at(&location);
        // The Tokio runtime is dropped only after the answer is printed, because dropping the runtime waits for
        // unfinished DNS lookups.
        let runtime = runtime()?;
        let answer = runtime.block_on(async {
            match command.progress_text() {
                Some(progress_text) => run_with_progress(&format!("{progress_text} {location}"), command.run(at)).await,
                None => command.run(at).await,
            }
        })?;
        self.print(answer)?;
        Ok(0)
    }

    /// Returns the store's `location` together with the options that say how to open the store.
    pub(crate) fn store_at<'l>(&self, location: &'l Location) -> StoreAccess<'l>
    where
        'a: 'l,
    {
        StoreAccess {
            location,
            wait: self.options.lock_timeout.unwrap_or(DEFAULT_LOCK_TIMEOUT),
            conf_dir: &self.options.cni_conf_dir,
        }
    }

    pub(crate) fn print(&mut self, answer: CommandAnswer) -> CommandResult<()> {
        answer.print(self.options.output, self.out, self.err)
    }

    /// Chooses the store. Prints the chosen store on stderr, unless the store's URL was given on the command line.
    pub(crate) fn choose(&mut self) -> CommandResult<ChosenStore> {
        let chosen = self.locate(self.options.store.as_deref())?;
        for problem in &chosen.unreadable {
            _ = writeln!(self.err, "warning: skipped {problem}");
        }
        if chosen.source != ChoiceSource::Url {
            _ = writeln!(self.err, "store: {} ({})", chosen.location, chosen.source);
        }
        Ok(chosen)
    }

    /// Returns every store that the CNI configuration names. If it names none, returns the default store if this exists.
    /// Warns of configuration files that cannot be read, which may name further stores.
    pub(crate) fn choose_all(&mut self) -> CommandResult<Vec<ChosenStore>> {
        let stores = all_for_operator(self.drivers, self.env, &self.options.cni_conf_dir);
        let mut stores = stores.map_err(|error| self.explain(&error))?;
        for problem in stores.iter().flat_map(|chosen| &chosen.unreadable) {
            _ = writeln!(self.err, "warning: skipped {problem}");
        }
        stores.retain(|chosen| {
            chosen.source != ChoiceSource::Default || chosen.location.path().is_some_and(Path::exists)
        });
        Ok(stores)
    }

    /// Finds the store at `url`, and the store's credentials. If `url` is `None`, finds the store that the
    /// configuration files name.
    pub(crate) fn locate(&self, url: Option<&str>) -> CommandResult<ChosenStore> {
        // Operators of Calico configure the datastore in calicoctl's configuration file.
        let file = self.options.config.as_deref();
        let file = file.map_or(ConfigFile::IfThere(DEFAULT_CONFIG_FILE.as_ref()), ConfigFile::Given);
        let chosen = for_operator(self.drivers, url, file, self.env, &self.options.cni_conf_dir);
        chosen.map_err(|error| self.explain(&error))
    }

    /// Builds the error for a configuration that names no usable store, with a hint on how to correct it.
    pub(crate) fn explain(&self, error: &ConfigError) -> CommandFailure {
        CommandFailure::new(error).hint(self.drivers.advice(error))
    }
}

/// Adapts an [`OpenStoreCommand`], which expects an open store, to a [`StoreCommand`].
struct OpeningCommand<'a>(&'a dyn OpenStoreCommand);

#[async_trait(?Send)]
impl StoreCommand for OpeningCommand<'_> {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        at.carry_out(self.0).await
    }
}

impl StoreAccess<'_> {
    /// Opens the store, runs the command on the open store, and closes the store. A dry run writes nothing. If a dry
    /// run would have to create the store, it uses an empty store in memory instead.
    pub(crate) async fn carry_out(self, command: &dyn OpenStoreCommand) -> CommandResult<CommandAnswer> {
        command.check()?;
        run_with_progress(&format!("working on {self}"), async {
            let store_use = command.store_use();
            if !command.dry_run() {
                return self
                    .with_operator(store_use, async |operator| self.run_and_refresh_rules(command, operator).await)
                    .await;
            }
            let open = match store_use {
                StoreUse::Make => match self.open_existing().await? {
                    Some(open) => open,
                    None => {
                        maintenance::check_creatable(self.location).await.map_err(|error| self.explain(error))?;
                        let memory = self.location.drivers().memory();
                        let opened = datastore::open(&memory, &Create::IfMissing.with_wait(self.wait)).await;
                        opened.map_err(|error| self.explain(error))?
                    }
                },
                _ => self.open(StoreUse::Read).await?,
            };
            let rehearsal = Arc::new(Rehearsal::new(open.store()));
            let run =
                async |operator: &Operator| command.run(operator, Deadline::after(command.timeout_after_open())).await;
            Ok(self.with_operator_on(open, rehearsal, run).await?.into_dry_run())
        })
        .await
    }

    /// Runs a command. Refreshes this machine's NAT rules if the command may have changed pools, unless Felix maintains
    /// the rules.
    async fn run_and_refresh_rules(
        self,
        command: &dyn OpenStoreCommand,
        operator: &Operator,
    ) -> CommandResult<CommandAnswer> {
        let deadline = Deadline::after(command.timeout_after_open());
        let work = command.run(operator, deadline);
        match command.changes_pools() {
            true => follow_pool_changes(operator, self.location, deadline, work).await,
            false => work.await,
        }
    }
}

/// Builds the single-threaded Tokio runtime of every command except `margay watch`.
pub(crate) fn runtime() -> CommandResult<Runtime> {
    build_runtime(Builder::new_current_thread())
}

/// Builds the multi-threaded Tokio runtime of `margay watch`. A worker thread reads changes from the store while the
/// main thread waits for a program or webhook to handle an event.
pub(crate) fn watch_runtime() -> CommandResult<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1);
    build_runtime(builder)
}

fn build_runtime(mut builder: Builder) -> CommandResult<Runtime> {
    builder.enable_all().build().map_err(|error| CommandFailure::new(format!("cannot start: {error}")))
}

/// The output of a command, as text and as JSON. An answer is printed after the store is closed, so a slow reader of
/// stdout blocks no other process.
#[derive(Debug)]
pub(crate) struct CommandAnswer {
    text: String,
    /// The text for `-o wide`, if it differs from `text`.
    wide: Option<String>,
    layout: Layout,
    json: String,
    notes: Vec<String>,
    failure: Option<CommandFailure>,
    stdout_is_taken: bool,
}

/// How the line breaks at the end of an answer's text are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// The answer's text ends with exactly one line break, regardless of how many the text had.
    Trimmed,
    /// The answer's text is printed unchanged.
    Exact,
}

impl CommandAnswer {
    /// Creates an answer from a text and the value that is printed as JSON.
    pub(crate) fn new(text: impl Into<String>, json: &impl Serialize) -> CommandResult<Self> {
        let json = serde_json::to_string_pretty(json).map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
        Ok(Self {
            text: text.into(),
            wide: None,
            layout: Layout::Trimmed,
            json,
            notes: Vec::new(),
            failure: None,
            stdout_is_taken: false,
        })
    }

    /// Creates an answer that prints `rows` as a table, or in JSON as an array in the field `name`.
    pub(crate) fn rows<R: TableRow>(name: &'static str, rows: &[R]) -> CommandResult<Self> {
        Self::new(table(rows), &BTreeMap::from([(name, rows)]))
    }

    /// Replaces the text of the answer by a short text and a text for `-o wide`. The short text and the text for `-o
    /// wide` are printed unchanged, with the line breaks at their ends.
    pub(crate) fn with_layout(mut self, text: String, wide: String) -> Self {
        (self.text, self.wide, self.layout) = (text, Some(wide), Layout::Exact);
        self
    }

    pub(crate) fn notes(self, notes: impl IntoIterator<Item = String>) -> Self {
        notes.into_iter().fold(self, Self::note)
    }

    /// Adds a note that is printed on stderr in addition to the answer.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Marks the answer as incomplete: after the answer is printed, the command fails with `failure`.
    pub(crate) fn incomplete(mut self, failure: CommandFailure) -> Self {
        self.failure = Some(failure);
        self
    }

    /// Directs the answer to stderr, for a command that writes its data to stdout.
    pub(crate) fn on_stderr(mut self) -> Self {
        self.stdout_is_taken = true;
        self
    }

    /// Turns the answer into the answer of a dry run: "Successfully ..." becomes "Dry run: would have ...".
    pub(crate) fn into_dry_run(mut self) -> Self {
        let reported = |line: &str| match line.strip_prefix("Successfully ") {
            Some(done) => format!("Dry run: would have {done}"),
            None => line.to_owned(),
        };
        self.text = self.text.lines().map(reported).collect::<Vec<_>>().join("\n");
        let says_so = ["\n  \"dry_run\":", "\n  \"would_"].iter().any(|member| self.json.contains(member));
        if !says_so && let Some(members) = self.json.strip_suffix("\n}") {
            self.json = format!("{members},\n  \"dry_run\": true\n}}");
        }
        self
    }

    pub(crate) fn print(self, format: Format, out: &mut dyn Write, err: &mut dyn Write) -> CommandResult<()> {
        for note in &self.notes {
            _ = writeln!(err, "note: {note}");
        }
        let out: &mut dyn Write = if self.stdout_is_taken { &mut *err } else { &mut *out };
        match format {
            Format::Table => self.layout.print(&self.text, out)?,
            Format::Wide => self.layout.print(self.wide.as_ref().unwrap_or(&self.text), out)?,
            Format::Yaml => {
                let value =
                    serde_json::from_str(&self.json).map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
                write!(out, "{}", yaml(&value))?;
            }
            Format::Json => writeln!(out, "{}", self.json)?,
        }
        out.flush()?;
        self.failure.map_or(Ok(()), Err)
    }
}

impl Layout {
    fn print(self, text: &str, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Trimmed => writeln!(out, "{}", text.trim_end_matches('\n')),
            Self::Exact => write!(out, "{text}"),
        }
    }
}

/// Awaits the future `work`, which may change pools, and then refreshes this machine's NAT rules if the pools' CIDRs
/// have changed. If refreshing the NAT rules fails, the answer only gets a note, because the pools are already changed.
///
/// # Errors
/// Any error that `work` returns.
async fn follow_pool_changes(
    operator: &Operator,
    location: &Location,
    deadline: Deadline,
    work: impl Future<Output = CommandResult<CommandAnswer>>,
) -> CommandResult<CommandAnswer> {
    // A command that cannot read the cluster's document fails itself.
    let Ok(cluster) = operator.cluster_information().await else { return work.await };
    let scope = if location.is_shared() { StoreScope::Cluster(cluster.as_ref()) } else { StoreScope::Machine };
    if !ForwardingOwner::decide(scope, host::felix_file()).is_plugin() {
        return work.await;
    }
    let before = PoolNetworks::read(operator, deadline).await;
    let answer = work.await?;
    let after = PoolNetworks::read(operator, deadline).await;
    let (Some(before), Some(after)) = (before, after) else { return Ok(answer) };
    if before == after || (before.masqueraded.is_empty() && after.masqueraded.is_empty()) {
        return Ok(answer);
    }
    let store = served::rules_name(location, cluster.as_ref().map_or("", ClusterInformation::guid));
    Ok(match masquerade::refresh(&store, &after.masqueraded, &after.all) {
        Ok(()) => answer,
        Err(error) => answer.note(format!(
            "the rules of this machine for pools with natOutgoing stay as they are until the next container starts: {error}"
        )),
    })
}

/// The CIDRs of all pools of a store, and the CIDRs of the pools with `natOutgoing`.
#[derive(Debug, PartialEq, Eq)]
struct PoolNetworks {
    masqueraded: Vec<IpNet>,
    all: Vec<IpNet>,
}

impl PoolNetworks {
    /// Reads the pools' CIDRs, or returns `None` if the store cannot be read. Returns no error, because the command
    /// that changes the pools fails with the same store error.
    async fn read(operator: &Operator, deadline: Deadline) -> Option<Self> {
        let pools = operator.ipam().inventory(deadline).await.ok()?.pools;
        let masqueraded = pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect();
        Some(Self { masqueraded, all: pools.iter().map(Pool::cidr).collect() })
    }
}
