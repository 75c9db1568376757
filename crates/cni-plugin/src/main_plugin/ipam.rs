//! Calls the IPAM plugin of a network, which is either another program or a part of this program. If the IPAM plugin is
//! a part of this program, its allocator runs in this process.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use std::{fs, thread};

use agent::{Allocator, CniError, Code, Result};
use serde::Deserialize;

use super::setup::MainContext;
use crate::env::{CniCall, CniVerb};
use crate::gojson::quoted;
use crate::invocation::{PluginName, catch_panic};
use crate::kubernetes::HostLocal;
use crate::netconf::{NetConf, check_name};
use crate::result::AddResult;
use crate::run::CniContext;
use crate::versions;

/// Time limit for a call of an IPAM plugin that is another program. The IPAM plugin `dhcp` may wait for a DHCP server
/// for a minute.
const CHILD_TIMEOUT: Duration = Duration::from_secs(90);
/// Pause between two checks whether the IPAM plugin's process has exited after closing its output. After it has closed
/// its output, a process usually exits within 200 microseconds.
const EXIT_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The IPAM plugin that a network configuration names.
#[derive(Debug)]
pub(super) enum IpamPlugin {
    /// The IPAM plugin in this program, called under the given plugin name.
    Own(PluginName),
    /// An IPAM plugin that is another program, with the path of that program.
    Other(PathBuf),
}

/// A call of the IPAM plugin during a call of the main plugin.
pub(super) struct IpamCall<'a> {
    pub(super) setup: &'a MainContext<'a>,
    pub(super) verb: CniVerb,
    /// The value of the variable `CNI_ARGS` for the IPAM plugin.
    pub(super) args: &'a str,
    /// The configuration that the IPAM plugin gets; `None` if it equals the main plugin's configuration.
    pub(super) changed: Option<&'a [u8]>,
}

impl MainContext<'_> {
    /// Finds the IPAM plugin that the network configuration names.
    ///
    /// # Errors
    /// An error with Calico's message if the IPAM plugin is not found.
    pub(super) fn ipam_plugin(&self) -> Result<IpamPlugin> {
        IpamPlugin::find(&self.conf.ipam_type, &self.invocation.environment.text("CNI_PATH"))
    }

    /// Returns an IPAM plugin call that passes the main plugin's configuration through unchanged.
    pub(super) fn ipam_call(&self, verb: CniVerb) -> IpamCall<'_> {
        IpamCall { setup: self, verb, args: &self.args, changed: None }
    }

    /// Calls the IPAM plugin for a CHECK or DEL of addresses that the plugin assigned earlier. host-local's
    /// configuration is adapted by [`HostLocal::for_del`], so the Kubernetes API is not needed.
    ///
    /// # Errors
    /// An error with Calico's message if host-local's configuration is malformed, and any error of the IPAM plugin.
    pub(super) fn call_later(&self, plugin: &IpamPlugin, verb: CniVerb, allocator: &dyn Allocator) -> Result<()> {
        let mut changed = None;
        if self.conf.ipam_type == "host-local" {
            let host_local = HostLocal::new(&self.json)?;
            if host_local.wants_pod_cidrs() {
                changed = Some(host_local.for_del().conf().to_string().into_bytes());
            }
        }
        let call = IpamCall { changed: changed.as_deref(), ..self.ipam_call(verb) };
        plugin.call(&call, allocator).map(drop)
    }
}

impl IpamPlugin {
    /// Finds the IPAM plugin with this name in the folders of `CNI_PATH`.
    ///
    /// # Errors
    /// An error with Calico's message if the plugin's name is empty or a path, or if no folder of `CNI_PATH` contains
    /// the plugin.
    pub(super) fn find(kind: &str, cni_path: &str) -> Result<Self> {
        if kind.is_empty() {
            return Err(CniError::internal("no plugin name provided"));
        }
        if kind.contains('/') {
            return Err(CniError::internal(format!("invalid plugin name: {kind}")));
        }
        let folders: Vec<&str> = cni_path.split(':').collect();
        let paths = folders.iter().map(|folder| Path::new(folder).join(kind));
        let found = paths.filter_map(|path| fs::metadata(&path).ok().map(|file| (path, file)));
        let Some((path, file)) = found.into_iter().find(|(_, file)| file.is_file()) else {
            let folders = folders.join(" ");
            return Err(CniError::internal(format!("failed to find plugin {} in path [{folders}]", quoted(kind))));
        };
        let own = fs::metadata("/proc/self/exe").ok().map(|file| (file.dev(), file.ino()));
        let is_own = own == Some((file.dev(), file.ino()));
        Ok(if is_own { Self::Own(PluginName::from_argument(Some(OsStr::new(kind)))) } else { Self::Other(path) })
    }

    pub(super) fn is_other(&self) -> bool {
        matches!(self, Self::Other(_))
    }

    /// Calls the IPAM plugin with a CNI verb. Returns the CNI result of an ADD, and an empty result for any other verb.
    ///
    /// # Errors
    /// The IPAM plugin's own error, or an error if its output cannot be parsed.
    pub(super) fn call(&self, call: &IpamCall<'_>, allocator: &dyn Allocator) -> Result<AddResult> {
        match self {
            // Catch panics of the IPAM plugin, because the main plugin must undo its own changes after a panic.
            Self::Own(name) => catch_panic(|| call.carry_out(*name, allocator)),
            Self::Other(path) => {
                let printed = run_child(path, call)?.into_result()?;
                if call.verb == CniVerb::Add { AddResult::parse(&printed) } else { Ok(AddResult::default()) }
            }
        }
    }
}

/// The exit status and the output of the IPAM plugin's process.
struct ChildOutput {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

fn run_child(path: &Path, call: &IpamCall<'_>) -> Result<ChildOutput> {
    let failed = |error: io::Error| CniError::internal(format!("fork/exec {}: {error}", path.display()));
    let mut command = Command::new(path);
    let own = [("CNI_COMMAND", call.verb.name()), ("CNI_ARGS", call.args)];
    let variables = call.setup.conf.variables.iter().map(|(name, value)| (*name, value.as_str()));
    command.env_clear().envs(call.setup.invocation.environment.variables()).envs(variables).envs(own);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let text = call.changed.unwrap_or(&call.setup.stdin).to_vec();
    // Write the configuration in a separate thread, because an IPAM plugin that does not read it must not block the
    // call.
    thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&text)));
    let (stdout, stderr) = (read_to_end_in_thread(stdout), read_to_end_in_thread(stderr));
    let deadline = Instant::now() + CHILD_TIMEOUT;
    let left = || deadline.saturating_duration_since(Instant::now());
    let printed = (stdout.recv_timeout(left()), stderr.recv_timeout(left()));
    // An IPAM plugin may close its standard output and standard error, and continue to run.
    let status = loop {
        let ended = child.try_wait().map_err(failed)?;
        if ended.is_some() || left().is_zero() {
            break ended;
        }
        thread::sleep(EXIT_POLL_INTERVAL.min(left()));
    };
    let (Some(status), (Ok(stdout), Ok(stderr))) = (status, printed) else {
        let _ = child.kill();
        let _ = child.wait();
        let name = path.display();
        return Err(CniError::new(
            Code::TryAgain,
            format!("{name} has not answered within {CHILD_TIMEOUT:?} and was ended"),
        ));
    };
    let _ = io::stderr().write_all(&stderr);
    Ok(ChildOutput { status, stdout, stderr })
}

/// Reads a pipe to its end in a separate thread, and returns a channel that receives the bytes.
fn read_to_end_in_thread(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // If reading the pipe fails, use the bytes that were read before the error.
            let _ = pipe.read_to_end(&mut bytes);
        }
        let _ = sender.send(bytes);
    });
    receiver
}

/// Describes the exit status of a process in the words that Go uses.
fn describe_exit(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {signal}"),
        (None, None) => "unknown".to_owned(),
    }
}

impl IpamCall<'_> {
    /// Runs the IPAM plugin in this process, under the given plugin name.
    fn carry_out(&self, name: PluginName, allocator: &dyn Allocator) -> Result<AddResult> {
        let MainContext { invocation, json, conf, call, .. } = self.setup;
        let call = CniCall {
            verb: self.verb,
            command: self.verb.name().to_owned(),
            args: self.args.to_owned(),
            ..call.clone()
        };
        let changed = self.changed.map(check_name).transpose()?;
        let net = match &changed {
            Some(changed) => NetConf::decode(changed)?,
            None => conf.net.clone(),
        };
        let json = changed.as_ref().unwrap_or(json);
        let version = versions::of_call(&call, json)?;
        let context = CniContext::new(invocation, name, call, net, &conf.variables)?;
        Ok(context.carry_out(json, version, allocator)?.unwrap_or_default())
    }
}

impl ChildOutput {
    /// Returns the output of a successful IPAM plugin. If the IPAM plugin failed, returns its error in the form in
    /// which the main plugin reports it.
    fn into_result(self) -> Result<Vec<u8>> {
        #[derive(Deserialize)]
        #[serde(rename = "Error")]
        struct ChildError {
            #[serde(default)]
            code: u32,
            #[serde(default)]
            msg: String,
            #[serde(default)]
            details: String,
        }
        if self.status.success() {
            return Ok(self.stdout);
        }
        let status = describe_exit(self.status);
        if self.stdout.is_empty() {
            return Err(CniError::internal(match self.stderr.as_slice() {
                [] => format!("netplugin failed with no error message: {status}"),
                stderr => format!("netplugin failed: {}", quoted(&String::from_utf8_lossy(stderr))),
            }));
        }
        Err(match serde_json::from_slice::<ChildError>(&self.stdout) {
            Ok(ChildError { code, msg, details }) => CniError::new(Code::of(code), msg).with_details(details),
            Err(error) => CniError::internal(format!(
                "netplugin failed but error parsing its diagnostic message {}: {error}",
                quoted(&String::from_utf8_lossy(&self.stdout))
            )),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kind: &str, path: &str) -> String {
        IpamPlugin::find(kind, path).unwrap_err().message().to_owned()
    }

    #[test]
    fn ipam_plugins_are_found_by_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        fs::create_dir(folder.path().join("folder")).unwrap();
        fs::write(folder.path().join("other"), "").unwrap();
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), folder.path().join("calico-ipam")).unwrap();
        assert_eq!(error("", &path), "no plugin name provided");
        assert_eq!(error("../x", &path), "invalid plugin name: ../x");
        assert_eq!(
            error("folder", &format!("/none:{path}")),
            format!("failed to find plugin \"folder\" in path [/none {path}]")
        );
        assert!(IpamPlugin::find("other", &path).unwrap().is_other());
        assert!(matches!(IpamPlugin::find("calico-ipam", &path).unwrap(), IpamPlugin::Own(PluginName::CalicoIpam)));
    }

    #[test]
    fn ipam_errors_are_passed_on() {
        use std::os::unix::process::ExitStatusExt;
        let judge = |stdout: &str, stderr: &str| {
            let status = ExitStatus::from_raw(3 << 8);
            let answer = ChildOutput { status, stdout: stdout.into(), stderr: stderr.into() };
            let error = answer.into_result().unwrap_err();
            (error.code().number(), error.message().to_owned(), error.details().to_owned())
        };
        let own = judge(r#"{"cniVersion":"1.0.0","code":99,"msg":"m","details":"d"}"#, "");
        assert_eq!(own, (99, "m".into(), "d".into()));
        assert_eq!(judge("", "something broke\n").1, "netplugin failed: \"something broke\\n\"");
        assert_eq!(judge("", "").1, "netplugin failed with no error message: exit status 3");
        assert!(judge("x", "").1.starts_with("netplugin failed but error parsing its diagnostic message \"x\": "));
    }
}
