//! Runs `margay` commands inside this process with a separate environment, and reads and writes stores directly.

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

/// Time limit that is longer than any command takes, but shorter than the timeout of a test.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: u8,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Done {
    /// Returns stdout of a `margay` command that succeeded and printed nothing on stderr.
    pub(crate) fn answer(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{}", self.out);
        self.out
    }

    pub(crate) fn json(self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{}", self.err);
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// Returns stderr of a `margay` command that failed and printed nothing on stdout.
    pub(crate) fn failure(self) -> String {
        assert_eq!((self.code, self.out.as_str()), (1, ""), "{}", self.err);
        self.err
    }
}

#[derive(Debug)]
pub(crate) struct Run {
    args: Vec<OsString>,
    env: HashMap<String, String>,
}

impl Run {
    /// Prepares a run of `margay` with these arguments and an empty environment.
    pub(crate) fn new<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        let args = std::iter::once("margay".into()).chain(args.into_iter().map(Into::into)).collect();
        Self { args, env: HashMap::new() }
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    pub(crate) fn run(self) -> Done {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = cli::run(&drivers(), self.args, &|name| self.env.get(name).cloned(), &mut out, &mut err);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Done { code, out: text(out), err: text(err) }
    }
}

/// Runs `margay` with these arguments and an empty environment.
pub(crate) fn margay<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Done {
    Run::new(args).run()
}

/// A temporary folder and the location of a store, which need not exist.
#[derive(Debug)]
pub(crate) struct Lab {
    lab: testkit::lab::Lab,
    pub(crate) location: Location,
}

impl Lab {
    /// Creates a test environment (a temporary folder for a store) for each engine.
    pub(crate) fn each() -> [Self; 2] {
        ENGINES.map(|engine| {
            let mut lab = testkit::lab::Lab::new(engine);
            lab.store = lab.root.path().join("some/store");
            Self { location: lab.location(), lab }
        })
    }

    /// Returns whether the parent of the store's folder exists. Only a `margay` command creates this folder, so its
    /// existence shows whether a command has created anything.
    pub(crate) fn exists(&self) -> bool {
        self.folder().join("some").exists()
    }

    /// The test's temporary folder, under which the store's folder is created.
    pub(crate) fn folder(&self) -> &Path {
        self.lab.root.path()
    }

    /// Runs `margay` on the test's store with the given arguments, which are separated by spaces.
    pub(crate) fn margay(&self, args: &str) -> Done {
        margay(["--store".to_owned(), self.location.to_string()].into_iter().chain(args.split(' ').map(str::to_owned)))
    }

    /// Assigns one IPv4 address to a container as the plugin does, and returns the address.
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

    /// Opens the existing store, runs `work`, and closes the store.
    pub(crate) fn with_ipam<T>(&self, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
        self.lab.with_ipam(Create::Never, async |ipam, _| work(ipam).await)
    }
}
