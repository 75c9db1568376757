//! Lists all commands that work on a store.

use std::collections::BTreeSet;
use std::fs;

use crate::common::margay;
use crate::conditions::ground::{done, process};

/// How a `margay` command uses the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Reads,
    /// The command changes a store that exists already.
    Changes,
    /// The command changes an existing store, or creates a missing store.
    Makes,
    /// The command fills a store that is empty or does not exist.
    Fills,
}

/// A command of `margay`: its name, and the arguments with which the command succeeds on
/// [`Ground`](crate::conditions::ground::Ground).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) name: &'static str,
    args: &'static str,
    pub(crate) kind: Kind,
}

impl Command {
    /// The command line after `margay`, without global options.
    pub(crate) fn words(&self) -> String {
        format!("{} {}", self.name, self.args).trim_end().to_owned()
    }
}

const fn reads(name: &'static str, args: &'static str) -> Command {
    Command { name, args, kind: Kind::Reads }
}

const fn changes(name: &'static str, args: &'static str) -> Command {
    Command { name, args, kind: Kind::Changes }
}

const fn makes(name: &'static str, args: &'static str) -> Command {
    Command { name, args, kind: Kind::Makes }
}

const fn fills(name: &'static str, args: &'static str) -> Command {
    Command { name, args, kind: Kind::Fills }
}

/// All commands that work on a store.
pub(crate) const COMMANDS: &[Command] = &[
    makes("cluster init", "--pool 10.98.0.0/16"),
    changes("node register", "--node node1 --label rack=b --nodename-file {out}"),
    makes("pool create", "new 10.99.0.0/24 --gateway 10.99.0.1"),
    reads("pool list", ""),
    changes("pool delete", "spare"),
    changes("reservation create", "more 10.65.0.77"),
    reads("reservation list", ""),
    changes("reservation delete", "few"),
    changes("quota set", "--namespace shop 10"),
    reads("quota list", ""),
    changes("quota delete", "--node node1"),
    reads("ipam show", ""),
    reads("ipam show", "--ip {ip}"),
    reads("ipam show", "--show-borrowed"),
    reads("ipam show", "--show-configuration"),
    reads("ipam show", "--forecast"),
    reads("ipam map", ""),
    reads("ipam check", ""),
    changes("ipam release", "--ip {ip}"),
    changes("ipam release", "--handle net.c1"),
    changes("ipam release", "--container c1"),
    changes("ipam release", "--from-report {dir}/report.json"),
    changes("ipam assign-prefix", "racks --node vm1"),
    changes("ipam pin", "10.65.0.78 shop/web-0"),
    changes("ipam unpin", "10.65.0.79"),
    reads("ipam list", ""),
    reads("ipam quarantine list", ""),
    changes("ipam quarantine release", "10.65.0.8"),
    changes("ipam configure", "--ip-cooldown-seconds=60"),
    changes("ipam split", "4 --name main"),
    reads("ipam history", "{ip}"),
    reads("ipam explain", "--node node1"),
    reads("metrics", ""),
    reads("get", "ippool"),
    reads("get", "ippool main"),
    makes("create", "-f {dir}/new.yaml"),
    makes("apply", "-f {dir}/new.yaml -f {dir}/spare.yaml"),
    changes("replace", "-f {dir}/spare.yaml"),
    changes("delete", "ippool spare"),
    reads("gc", "--boot --looks {dir}/looks"),
    reads("watch", "--for 1s"),
    reads("watch", "--for 1s --list --exec /bin/true"),
    reads("store status", ""),
    reads("store verify", ""),
    reads("store backup", "--force {out}"),
    fills("store restore", "{dir}/backup"),
    changes("store compact", ""),
    changes("store upgrade", ""),
    reads("export", "--force {out}"),
    fills("import", "{dir}/export"),
    changes("import host-local", "{dir}/leases --network other --node node1"),
    changes("import whereabouts", "{dir}/whereabouts.json --network other --node node1"),
    changes("import podman", "{dir}/podman.json --network other --node node1"),
    reads("migrate", "{store} {other}"),
];

/// Commands that do not work on an existing store, each with the reason.
const WITHOUT_STORE: &[(&str, &str)] = &[
    ("install", "it works on this node's files"),
    ("store create", "it leaves a store that is there alone; `store::format` has its tests"),
    ("serve", "it does not end by itself; `tests/daemon` has its tests"),
    ("conformance", "it judges a store that it makes, or that it is told to erase"),
    ("etcd status", "it refuses an embedded store; `etcd_size` has its tests"),
    ("etcd compact", "it refuses an embedded store; `etcd_size` has its tests"),
    ("etcd plan", "it only calculates"),
    ("completions", "it prints text about the commands"),
];

#[test]
fn commands_are_all_covered() {
    let folder = tempfile::tempdir().unwrap();
    // Every command has a man page, so the names of the man pages are the names of all commands.
    margay(["man-pages".as_ref(), folder.path().as_os_str()]).answer();
    let pages = fs::read_dir(folder.path()).unwrap().map(|page| page.unwrap().file_name().into_string().unwrap());
    let pages: BTreeSet<String> = pages.map(|page| page.trim_end_matches(".1").to_owned()).collect();
    // A command that has subcommands only groups them and does nothing by itself, except for `import`.
    let is_group =
        |page: &String| *page != "margay-import" && pages.iter().any(|other| other.starts_with(&format!("{page}-")));
    let there: BTreeSet<String> = pages.iter().filter(|page| !is_group(page)).cloned().collect();
    let page = |name: &str| format!("margay-{}", name.replace(' ', "-"));
    let known = COMMANDS.iter().map(|one| one.name).chain(WITHOUT_STORE.iter().map(|(name, _)| *name));
    assert_eq!(known.map(page).collect::<BTreeSet<_>>(), there);
}

#[test]
fn help_fits_screen_and_has_example() {
    let commands = COMMANDS.iter().map(|one| one.name).chain(WITHOUT_STORE.iter().map(|(name, _)| *name));
    // The test checks the help texts of commands and of command groups, such as `store`.
    let with_groups = commands.flat_map(|name| {
        let words: Vec<&str> = name.split(' ').collect();
        (0..=words.len()).map(|many| words[..many].join(" ")).collect::<Vec<_>>()
    });
    for name in with_groups.collect::<BTreeSet<String>>() {
        let args: Vec<String> = name.split_whitespace().chain(["--help"]).map(str::to_owned).collect();
        let mut help = process(&[], env!("CARGO_BIN_EXE_margay"), &args);
        help.env("COLUMNS", "80");
        let help = done(help).answer();
        assert!(help.lines().count() <= 50, "{name}: {} lines\n{help}", help.lines().count());
        assert!(help.contains("Examples:\n"), "{name}: {help}");
    }
}
