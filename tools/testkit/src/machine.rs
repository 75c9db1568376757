//! Starts machines of their own for tests: Linux namespaces with a shell script as their first process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use nix::unistd::Pid;

/// Starts a machine, whose first process is the shell `sh` with these arguments in new namespaces for mounts, network
/// and processes, and in those that the arguments `more_namespaces` of unshare name. Returns the process to wait for, and
/// the process id of the shell on the host, which the script must print as its first line.
///
/// The machine ends when the calling thread or the returned process ends, even if the caller is killed.
pub fn start_machine<S: AsRef<OsStr>>(
    more_namespaces: &[&str],
    arguments: impl IntoIterator<Item = S>,
) -> (Child, Pid) {
    let mut first = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid"])
        .args(more_namespaces)
        .args(["--fork", "--kill-child=KILL", "sh"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(first.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let Ok(number) = line.trim().parse() else {
        let mut said = String::new();
        first.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let _ = first.wait();
        panic!("the machine does not start: {said}");
    };
    (first, Pid::from_raw(number))
}
