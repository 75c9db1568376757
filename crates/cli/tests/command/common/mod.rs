//! Runs the command in this process, with an environment of its own, and looks into stores behind its back.

pub(crate) mod container;
pub(crate) mod endpoint;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use datastore::{Create, Location};
use ipam_core::Ipam;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use testkit::lab::ENGINES;

use crate::tested::drivers;

/// Longer than anything takes, shorter than a test run that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The outcome of a command.
#[derive(Debug)]
pub(crate) struct Done {
    /// The exit code.
    pub(crate) code: u8,
    /// Stdout.
    pub(crate) out: String,
    /// Stderr.
    pub(crate) err: String,
}

impl Done {
    /// Stdout of a command that succeeded and had nothing else to say.
    pub(crate) fn answer(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{}", self.out);
        self.out
    }

    /// The answer as JSON.
    pub(crate) fn json(self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{}", self.err);
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// Stderr of a command that failed and answered nothing.
    pub(crate) fn failure(self) -> String {
        assert_eq!((self.code, self.out.as_str()), (1, ""), "{}", self.err);
        self.err
    }
}

/// A command to run.
#[derive(Debug)]
pub(crate) struct Run {
    args: Vec<OsString>,
    env: HashMap<String, String>,
}

impl Run {
    /// The command with these arguments and an empty environment.
    pub(crate) fn new<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        let args = std::iter::once("margay".into()).chain(args.into_iter().map(Into::into)).collect();
        Self { args, env: HashMap::new() }
    }

    /// With a variable in the environment.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Runs it.
    pub(crate) fn run(self) -> Done {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = cli::run(&drivers(), self.args, &|name| self.env.get(name).cloned(), &mut out, &mut err);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Done { code, out: text(out), err: text(err) }
    }
}

/// Runs the command with these arguments and an empty environment.
pub(crate) fn margay<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Done {
    Run::new(args).run()
}

/// A store in a folder of its own, that need not exist, and the command in this process.
#[derive(Debug)]
pub(crate) struct Lab {
    lab: testkit::lab::Lab,
    /// The store.
    pub(crate) location: Location,
}

impl Lab {
    /// One for each engine.
    pub(crate) fn each() -> [Self; 2] {
        ENGINES.map(|engine| {
            let mut lab = testkit::lab::Lab::new(engine);
            lab.store = lab.root.path().join("some/store");
            Self { location: lab.location(), lab }
        })
    }

    /// True if anything was made on disk.
    pub(crate) fn exists(&self) -> bool {
        self.folder().join("some").exists()
    }

    /// A folder beside the store.
    pub(crate) fn folder(&self) -> &Path {
        self.lab.root.path()
    }

    /// Runs a command on the store; the arguments are separated by blanks.
    pub(crate) fn margay(&self, args: &str) -> Done {
        margay(["--store".to_owned(), self.location.to_string()].into_iter().chain(args.split(' ').map(str::to_owned)))
    }

    /// Gives a container one IPv4 address, as the plugin does, and returns the address.
    pub(crate) fn assign(&self, network: &str, container: &str) -> String {
        let attachment = Attachment {
            network: network.into(),
            container: container.into(),
            interface: "eth0".into(),
            node: "node1".into(),
            boot: Some("0badcafe".into()),
        };
        self.lab.assign(&AssignRequest::new(attachment, RequestedAddresses::any(1, 0))).to_string()
    }

    /// Opens the store, which must be there, and closes it again.
    pub(crate) fn with_ipam<T>(&self, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
        self.lab.with_ipam(Create::Never, async |ipam, _| work(ipam).await)
    }
}
