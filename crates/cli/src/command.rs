//! The kinds of commands, and the work that is done once around all of them: the store is chosen and opened, a dry run is
//! kept from it, the store is closed, and then the answer is printed.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use datastore::{
    Chosen, ConfigError, ConfigFile, Create, DEFAULT_CONFIG_FILE, Drivers, Environment, Location, Source, care,
    for_operator,
};
use ipam_operator::Operator;
use kv::Deadline;
use kv::wrap::Rehearsal;
use tokio::runtime::{Builder, Runtime};

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::options::Options;
use crate::outgoing;
use crate::output::patiently;
use crate::store::{Need, StoreAt, WAIT};

/// The longest time for a command once its store is open.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time for a command that reads all blocks: on a slow disk, of which other processes use a part, that can take
/// minutes.
pub(crate) const READING: Duration = Duration::from_secs(600);

/// A command.
pub(crate) enum Task<'a> {
    OnOpenStore(&'a dyn OnOpenStore),
    OnStore(&'a dyn OnStore),
    Standalone(&'a dyn Standalone),
}

/// A command on one store, which is open when it runs.
#[async_trait(?Send)]
pub(crate) trait OnOpenStore {
    /// The use that it makes of the store.
    fn need(&self) -> Need;

    /// True if it only says what it would do: all of its checks are made, and its writes go to memory.
    fn dry_run(&self) -> bool {
        false
    }

    /// The longest time for it once the store is open.
    fn patience(&self) -> Duration {
        if self.need() == Need::ReadAll { READING } else { PATIENCE }
    }

    /// True if it may change pools, for which this machine has rules.
    fn changes_pools(&self) -> bool {
        false
    }

    /// Refuses what is wrong whatever the store has, before a store is made for it.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Carries out the command.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer>;
}

/// A command on one store that opens the store by itself, perhaps several times, or works on its files.
#[async_trait(?Send)]
pub(crate) trait OnStore {
    /// For a command that needs an embedded store: its name, and what does the same for a cluster.
    fn only_embedded(&self, _drivers: &Drivers) -> Option<(&'static str, String)> {
        None
    }

    /// The words that a terminal shows while the command takes long; `None` if it shows its own.
    fn doing(&self) -> Option<&'static str> {
        None
    }

    /// Carries out the command.
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer>;
}

/// A command without a store, with several, or one that runs until it is stopped.
pub(crate) trait Standalone {
    /// Carries out the command, and returns the exit code.
    fn run(&self, call: &mut Call<'_>) -> Result<u8>;
}

/// A call of the program: its options, the stores that it is made with, its environment and its streams.
pub(crate) struct Call<'a> {
    pub(crate) options: &'a Options,
    pub(crate) drivers: &'a Drivers,
    pub(crate) env: &'a Environment<'a>,
    pub(crate) out: &'a mut dyn Write,
    pub(crate) err: &'a mut dyn Write,
}

impl<'a> Call<'a> {
    /// Carries out a command, and returns the exit code.
    pub(crate) fn carry_out(&mut self, task: &Task<'_>) -> Result<u8> {
        match task {
            Task::OnOpenStore(command) => self.on_store(&WithOpening(*command)),
            Task::OnStore(command) => self.on_store(*command),
            Task::Standalone(command) => command.run(self),
        }
    }

    /// Carries out a command on the chosen store, and prints its answer.
    pub(crate) fn on_store(&mut self, command: &dyn OnStore) -> Result<u8> {
        let Chosen { location, .. } = self.choose()?;
        if let Some((what, instead)) = command.only_embedded(self.drivers).filter(|_| location.is_shared()) {
            return Err(Failure::new(format!("{what} is not for {}", location.facts().name)).hint(instead));
        }
        let at = self.at(&location);
        // A name server that does not answer yet must not hold up the answer.
        let runtime = runtime()?;
        let answer = runtime.block_on(async {
            match command.doing() {
                Some(doing) => patiently(&format!("{doing} {location}"), command.run(at)).await,
                None => command.run(at).await,
            }
        })?;
        self.print(answer)?;
        Ok(0)
    }

    /// A store as this call opens it.
    pub(crate) fn at<'l>(&self, location: &'l Location) -> StoreAt<'l>
    where
        'a: 'l,
    {
        StoreAt { location, wait: self.options.lock_timeout.unwrap_or(WAIT), conf_dir: &self.options.cni_conf_dir }
    }

    /// Prints an answer in the form that was asked for.
    pub(crate) fn print(&mut self, answer: Answer) -> Result<()> {
        answer.print(self.options.output, self.out, self.err)
    }

    /// Chooses the store, and says which it is unless its URL was given.
    pub(crate) fn choose(&mut self) -> Result<Chosen> {
        let chosen = self.locate(self.options.store.as_deref())?;
        for problem in &chosen.unreadable {
            _ = writeln!(self.err, "warning: skipped {problem}");
        }
        if chosen.source != Source::Url {
            _ = writeln!(self.err, "store: {} ({})", chosen.location, chosen.source);
        }
        Ok(chosen)
    }

    /// The store at a URL, with the credentials for it; without a URL the one that the configuration names.
    pub(crate) fn locate(&self, url: Option<&str>) -> Result<Chosen> {
        // The file in which Calico's operators configure the datastore.
        let file = self.options.config.as_deref();
        let file = file.map_or(ConfigFile::IfThere(DEFAULT_CONFIG_FILE.as_ref()), ConfigFile::Given);
        let chosen = for_operator(self.drivers, url, file, self.env, &self.options.cni_conf_dir);
        chosen.map_err(|error| self.explain(&error))
    }

    /// The failure for a configuration that leads to no store.
    pub(crate) fn explain(&self, error: &ConfigError) -> Failure {
        Failure::new(error).hint(self.drivers.advice(error))
    }
}

/// A command on an open store, with its opening.
struct WithOpening<'a>(&'a dyn OnOpenStore);

#[async_trait(?Send)]
impl OnStore for WithOpening<'_> {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        at.carry_out(self.0).await
    }
}

impl StoreAt<'_> {
    /// Opens the store for a command, carries it out, and closes the store. A dry run writes nothing, and one that would
    /// make the store begins with an empty one.
    pub(crate) async fn carry_out(self, command: &dyn OnOpenStore) -> Result<Answer> {
        command.check()?;
        patiently(&format!("working on {self}"), async {
            let need = command.need();
            if !command.dry_run() {
                return self.on_ipam(need, async |operator| self.refreshing(command, operator).await).await;
            }
            let open = match need {
                Need::Make => match self.open_if_there().await? {
                    Some(open) => open,
                    None => {
                        care::could_be_made(self.location).await.map_err(|error| self.explain(error))?;
                        let memory = self.location.drivers().memory();
                        let opened = datastore::open(&memory, &Create::IfMissing.with_wait(self.wait)).await;
                        opened.map_err(|error| self.explain(error))?
                    }
                },
                _ => self.open(Need::Read).await?,
            };
            let rehearsal = Arc::new(Rehearsal::new(open.store()));
            let run = async |operator: &Operator| command.run(operator, Deadline::after(command.patience())).await;
            Ok(self.on_ipam_of(open, rehearsal, run).await?.of_a_dry_run())
        })
        .await
    }

    /// Runs a command, and refreshes the rules of this machine for pools if it may have changed some. In a cluster Felix
    /// makes them.
    async fn refreshing(self, command: &dyn OnOpenStore, operator: &Operator) -> Result<Answer> {
        let deadline = Deadline::after(command.patience());
        let work = command.run(operator, deadline);
        match command.changes_pools() && !self.location.is_shared() {
            true => outgoing::follow(operator, self.location, deadline, work).await,
            false => work.await,
        }
    }
}

/// The runtime for a command's calls.
pub(crate) fn runtime() -> Result<Runtime> {
    started(Builder::new_current_thread())
}

/// The runtime for a watch. Its second thread reads what the store reports while the first one waits for a receiver.
pub(crate) fn watching() -> Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1);
    started(builder)
}

fn started(mut builder: Builder) -> Result<Runtime> {
    builder.enable_all().build().map_err(|error| Failure::new(format!("cannot start: {error}")))
}
