//! Runs the spy, a program that replaces an IPAM plugin in `CNI_PATH`. The spy records its environment variables and
//! standard input, and runs the real IPAM plugin.
//!
//! The spy is the test program itself, called under the IPAM plugin's name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde_json::{Value, json};

/// The folder with the real IPAM plugins; the folder with the recording wrappers (spies) is beside it.
pub(crate) const PLUGINS: &str = "plugins";
/// The file to which spies write the IPAM calls, one JSON object per line, beside the folder in `CNI_PATH`.
pub(crate) const CALLS: &str = "calls";

/// Returns true if a program with this name is a spy.
pub(crate) fn is_spy(name: &str) -> bool {
    name == "calico-ipam" || name == "host-local" || name.starts_with("ipam-")
}

/// Runs the real IPAM plugin with this name, and passes on the plugin's output and exit status.
pub(crate) fn run(name: &str) -> ExitCode {
    let path = PathBuf::from(std::env::var_os("CNI_PATH").expect("CNI_PATH leads to what is noted"));
    let root = path.parent().unwrap();
    let mut stdin = String::new();
    std::io::stdin().read_to_string(&mut stdin).unwrap();
    let mut plugin = Command::new(root.join(PLUGINS).join(name))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    // Ignore the error: the IPAM plugin may end without reading all of its standard input.
    let _ = plugin.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = plugin.wait_with_output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let env: BTreeMap<String, String> = std::env::vars().filter(|(name, _)| name.starts_with("CNI_")).collect();
    let mut call = json!({"plugin": name, "env": env, "stdin": stdin, "exit": output.status.code()});
    if !output.status.success() {
        call["stdout_text"] = stdout.clone().into();
    }
    let mut calls = File::options().create(true).append(true).open(root.join(CALLS)).unwrap();
    calls.write_all(format!("{call}\n").as_bytes()).unwrap();
    std::io::stdout().write_all(&output.stdout).unwrap();
    ExitCode::from(output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// Returns the IPAM calls that the recording wrappers (spies) have noted since this function was last called. `given`
/// is the main plugin's standard input.
pub(crate) fn calls(root: &Path, given: &str) -> Value {
    let path = root.join(CALLS);
    let noted = fs::read_to_string(&path).unwrap_or_default();
    let _ = fs::remove_file(&path);
    let calls = noted.lines().map(|line| {
        let mut call: Value = serde_json::from_str(line).unwrap();
        if call["stdin"] == given {
            call["stdin"] = "as given to the plugin".into();
        }
        call
    });
    calls.collect()
}
