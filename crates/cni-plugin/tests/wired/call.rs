//! Calls the plugin for a recorded step of a test case.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// The number of plugin calls so far, from which each call's file names are derived.
static CALLS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
pub(crate) struct Call {
    root: PathBuf,
    pub(crate) env: BTreeMap<String, String>,
    arguments: Vec<String>,
    pub(crate) stdin: String,
}

/// The outcome of a plugin call.
#[derive(Debug)]
pub(crate) struct Came {
    /// The plugin's exit code and output (`exit`, and `stdout` or `stdout_text`), in the format of the recorded calls.
    pub(crate) outcome: Value,
    pub(crate) stdin: String,
    pub(crate) stderr: String,
}

impl Call {
    /// Returns the plugin call of a recorded step, with the placeholders in the step replaced by values.
    pub(crate) fn of(step: &Value, root: &Path) -> Self {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let env = step["env"].as_object().unwrap();
        let stdin = step.get("stdin_text").map_or_else(|| step["stdin"].to_string(), text);
        Self {
            root: root.to_owned(),
            env: env.iter().map(|(name, value)| (name.clone(), text(value))).collect(),
            arguments: step["argv"].as_array().into_iter().flatten().map(text).collect(),
            stdin,
        }
    }

    /// Runs the plugin with exactly the given environment variables. After a time limit, kills the plugin process and
    /// all processes that it has started.
    pub(crate) fn run(&self, patience: Duration) -> Came {
        let number = CALLS.fetch_add(1, Ordering::Relaxed);
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| self.root.join(format!("{name}{number}")));
        let mut plugin = Command::new(self.root.join("bin/calico"))
            .env_clear()
            .envs(&self.env)
            .args(&self.arguments)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        // Ignore the error: the plugin may end without reading all of its standard input.
        let _ = plugin.stdin.take().unwrap().write_all(self.stdin.as_bytes());
        let begun = Instant::now();
        let exit = loop {
            if let Some(status) = plugin.try_wait().unwrap() {
                break status.code().map_or_else(|| json!(status.to_string()), |code| json!(code));
            }
            if begun.elapsed() > patience {
                let group = Pid::from_raw(plugin.id().try_into().unwrap());
                killpg(group, Signal::SIGKILL).unwrap();
                plugin.wait().unwrap();
                break json!(format!("killed after {} s", patience.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(2).min(patience.saturating_sub(begun.elapsed())));
        };
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
        Came { outcome: outcome(exit, &text(&stdout)), stdin: self.stdin.clone(), stderr: text(&stderr) }
    }
}

/// Returns the exit status and the output of the call in the format of the recording.
pub(crate) fn outcome(exit: Value, stdout: &str) -> Value {
    match serde_json::from_str::<Value>(stdout) {
        Ok(document) => json!({"exit": exit, "stdout": document}),
        Err(_) => json!({"exit": exit, "stdout_text": stdout}),
    }
}
