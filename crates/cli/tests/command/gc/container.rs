//! Tests `margay gc` inside a container, which sees only a part of the machine.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

use super::{GONE, age_looks, assign_in, gc, is_held, lab, list, wrapped};
use crate::common::Lab;

/// In LXC, kind and WSL, `margay gc` runs in a separate process id namespace.
#[test]
fn gc_in_container_judges_only_what_was_given_inside() {
    let labs = Lab::each();
    let lab_ = &labs[1];
    lab(lab_, "198.18.51.0/24");
    // The container has its own network namespace, and only its processes are in it.
    let script = "stat -L -c %d:%i /proc/self/ns/net; readlink /proc/self/ns/pid; exec sleep 600";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--net", "sh", "-c", script]).process_group(0);
    let mut container = Group(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let mut reported = BufReader::new(container.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let (net, pid) = (reported.next().unwrap(), reported.next().unwrap());
    let pid = pid.trim_start_matches("pid:[").trim_end_matches(']').to_owned();
    let init = children_of(container.0.id());

    let outside = [lab_.assign("net", "outside-earlier"), assign_in(lab_, "outside", Some(GONE))];
    let unrecorded = assign_in(lab_, "unrecorded", None);
    let lives = assign_in(lab_, "lives", Some(&format!("{net}/{pid}")));
    let gone = assign_in(lab_, "gone", Some(&format!("{GONE}/{pid}")));
    let former = assign_in(lab_, "former-run", Some(&format!("{GONE}/{pid}0")));
    let enter = ["nsenter", "--target", &init, "--pid", "--mount"];
    let inside = |args: &str| {
        let done = wrapped(lab_, &enter, args);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    let said = inside("--boot --netns --apply");
    assert!(said.contains("3 assigned outside of this container (run margay gc where they were assigned)"), "{said}");
    age_looks(lab_, 61);
    let report: Value = serde_json::from_str(&inside("--boot --netns --apply -o json")).unwrap();
    assert_eq!(list(&report, "freed"), [gone.as_str()], "{report}");
    let left = &report["stores"][0]["left"];
    assert_eq!((&left["outside"], &left["live"], &left["of_this_boot"]), (&3.into(), &1.into(), &1.into()), "{report}");
    for address in outside.iter().chain([&unrecorded, &lives, &former]) {
        assert!(is_held(lab_, address), "{address}");
    }
    // Freeing the addresses of another node requires a scan of the whole machine.
    let refused = wrapped(lab_, &enter, "--node dead --free --apply");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("in a container nothing is seen of the machine"), "{said}");
    // Outside the container, `gc` scans the whole machine and finds the container's network namespace.
    let report = gc(lab_, "--netns -o json").json();
    assert_eq!(report["stores"][0]["left"]["live"], 1, "{report}");
    assert_eq!(list(&report, "waiting").len(), 3, "{report}");
}

/// Returns the first child process of a process.
fn children_of(pid: u32) -> String {
    let read = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    read().split_whitespace().next().unwrap().to_owned()
}

/// Kills a process group when the value is dropped.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.0.id().try_into().unwrap()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}
