//! Tests of the plugin as a process: its standard streams, its log and its exit status.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use crate::common::{call_binary, environment, error_of, finish};

const PROGRAM: &str = env!("CARGO_BIN_EXE_margay-ipam");

#[test]
fn process_says_what_it_is_without_verb() {
    let outcome = call_binary(&Default::default(), b"");
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""));
    assert_eq!(
        outcome.stderr,
        format!(
            "Margay CNI IPAM plugin {}\nCNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n",
            env!("CARGO_PKG_VERSION")
        )
    );
}

/// Returns what a plugin call prints to standard output while its standard input stays open and empty. A plugin call
/// that tried to read the open, empty standard input would hang.
fn said_without_input(command: &mut Command) -> String {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let open = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(open);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn process_version_does_not_read_input() {
    let said = said_without_input(Command::new(PROGRAM).env_clear().env("CNI_COMMAND", "VERSION"));
    assert!(said.starts_with("{\"cniVersion\":\"1.1.0\""), "{said}");
}

#[test]
fn process_options_are_answered_without_reading() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("calico-ipam");
    symlink(PROGRAM, &link).unwrap();
    let version = format!(
        "margay-ipam {}\nCNI versions: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\nFormats of stores: 1, 2\n",
        env!("CARGO_PKG_VERSION")
    );
    // The plugin's command-line options work with and without CNI environment variables.
    for env in [Default::default(), environment("ADD")] {
        for option in ["--version", "-V", "-v"] {
            assert_eq!(said_without_input(Command::new(&link).env_clear().envs(&env).arg(option)), version);
        }
        for option in ["--help", "-h"] {
            let help = said_without_input(Command::new(PROGRAM).env_clear().envs(&env).arg(option));
            assert!(help.contains("\"type\": \"margay-ipam\"") && help.contains("margay --help"), "{help}");
        }
    }
}

#[test]
fn process_ignores_arguments_that_are_no_options() {
    let conf = br#"{"name":"net1","type":"calico","datastore_type":"foo"}"#;
    let plain = call_binary(&environment("ADD"), conf);
    let argued = finish(Command::new(PROGRAM).env_clear().envs(environment("ADD")).arg("version"), conf);
    assert_eq!(error_of(&plain).1, "unknown datastore type: foo");
    assert_eq!((argued.exit, argued.stdout), (plain.exit, plain.stdout));
}

/// Tests positional arguments on the plugin's command line. Calico's test harness passes the network configuration as
/// an argument.
#[test]
fn process_of_main_plugin_ignores_arguments() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["calico", "margay-cni"] {
        let link = folder.path().join(name);
        symlink(PROGRAM, &link).unwrap();
        let call = |arguments: &[&str], verb: Option<&str>| {
            let mut command = Command::new(&link);
            command.env_clear().envs(verb.map(environment).unwrap_or_default()).args(arguments);
            finish(&mut command, br#"{"cniVersion":"1.0.0","name":"n","type":"calico"}"#)
        };
        let version = call(&[], Some("VERSION"));
        assert!(version.exit == 0 && version.stdout.contains("supportedVersions"), "{version:?}");
        for arguments in [&[r#"{"name":"n"}"#][..], &["x", "-v"], &[""], &["-", "-x"], &["--", "-t"]] {
            let argued = call(arguments, Some("VERSION"));
            assert_eq!((argued.exit, &argued.stdout), (0, &version.stdout), "{name} {arguments:?}");
            let about = call(arguments, None);
            assert!(about.exit == 0 && about.stderr.starts_with("Margay CNI plugin"), "{about:?}");
        }
        for option in ["-x", "--versions", "-tv"] {
            let called = call(&[option], Some("DEL"));
            let usage = call(&[option], None);
            assert!((usage.exit, usage.stdout.as_str()) == (2, "") && usage.stderr.starts_with("Usage:"), "{usage:?}");
            match name {
                // If the plugin is called as `calico`, the expected outcome is what Calico's plugin did in the
                // recording.
                "calico" => assert_eq!((called.exit, called.stdout.as_str()), (2, ""), "{called:?}"),
                _ => assert_eq!(error_of(&called).0, 4, "{name} {option}"),
            }
        }
    }
}

#[test]
fn process_prints_every_error_on_standard_output() {
    let folder = tempfile::tempdir().unwrap();
    let inputs: [&[u8]; 7] = [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"{\"name\":\"\xff\"}",
        b"\xef\xbb\xbf{\"name\":\"n\"}",
        br#"{"name":"n","datastore_type":"x"}"#,
    ];
    for name in ["margay-ipam", "calico-ipam", "margay-cni", "calico", "another"] {
        let link = folder.path().join(name);
        symlink(PROGRAM, &link).unwrap();
        for (verb, input) in ["ADD", "DEL", "CHECK", "GC", "STATUS", "FOO"].iter().flat_map(|verb| {
            let inputs = inputs.iter().map(move |input| (*verb, *input));
            inputs.collect::<Vec<_>>()
        }) {
            for arguments in [&[][..], &["x"], &["-x"]] {
                if (name, arguments) == ("calico", &["-x"][..]) {
                    continue;
                }
                let called = finish(Command::new(&link).env_clear().envs(environment(verb)).args(arguments), input);
                let (code, message, _) = error_of(&called);
                assert!(code > 0 && !message.is_empty(), "{name} {verb} {arguments:?}: {called:?}");
                let has_mark = input.starts_with(b"\xef") && arguments != ["-x"];
                assert!(!has_mark || message.contains("begins with a byte order mark"), "{message}");
            }
        }
    }
}

#[test]
fn process_behaves_by_name_it_is_called_by() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("calico-ipam");
    symlink(PROGRAM, &link).unwrap();
    let conf = br#"{"name":"net1","type":"bridge"}"#;
    let outcome = finish(Command::new(&link).env_clear().envs(environment("ADD")), conf);
    assert_eq!(error_of(&outcome), (999, "no etcd endpoints specified".into(), String::new()));
}

#[test]
fn process_refuses_kubernetes_with_remedy() {
    for (kind, code) in [("calico", 999), ("bridge", 7)] {
        let conf = format!(r#"{{"name":"net1","cniVersion":"1.0.0","type":"{kind}","datastore_type":"kubernetes"}}"#);
        for verb in ["ADD", "DEL"] {
            let outcome = finish(Command::new(PROGRAM).env_clear().envs(environment(verb)), conf.as_bytes());
            let (found, message, details) = error_of(&outcome);
            assert_eq!((found, message.as_str()), (code, "datastore type kubernetes is not supported"));
            assert!(details.contains("etcdv3"), "{details}");
        }
    }
}

#[test]
fn process_fails_when_result_cannot_be_printed() {
    for (verb, conf) in [
        ("VERSION", ""),
        (
            "ADD",
            r#"{"name":"net1","cniVersion":"1.0.0","type":"calico","datastore_type":"sled","ipam":{"assign_ipv4":"false"}}"#,
        ),
    ] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("conf");
        fs::write(&input, conf).unwrap();
        let status = Command::new(PROGRAM)
            .env_clear()
            .envs(environment(verb))
            .stdin(File::open(&input).unwrap())
            .stdout(full)
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(1), "{verb}");
    }
}

#[test]
fn process_log_costs_nothing_when_not_writable() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("conf");
    let conf = r#"{"name":"net1","cniVersion":"1.0.0","type":"calico","datastore_type":"sled","log_level":"debug","log_file_path":"/dev/full","ipam":{"assign_ipv4":"false"}}"#;
    fs::write(&input, conf).unwrap();
    let output = Command::new(PROGRAM)
        .env_clear()
        .envs(environment("ADD"))
        .stdin(File::open(&input).unwrap())
        .stderr(OpenOptions::new().write(true).open("/dev/full").unwrap())
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(0), &b"{\n    \"cniVersion\": \"1.0.0\"\n}"[..])
    );
}

#[test]
fn process_log_goes_to_standard_error_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a/b/log");
    let secret = "hunter2";
    let conf = |level: &str, path: &str| {
        format!(
            r#"{{"name":"net1","type":"calico","datastore_type":"foo","log_level":"{level}","log_file_path":"{path}","policy":{{"k8s_auth_token":"{secret}"}},"etcd_endpoints":"http://u:{secret}@a:1"}}"#
        )
    };
    let path = file.display().to_string();
    let outcome = call_binary(&environment("ADD"), conf("DEBUG", &path).as_bytes());
    assert_eq!(error_of(&outcome).1, "unknown datastore type: foo");
    let log = fs::read_to_string(&file).unwrap();
    assert!(log.contains("DEBUG") && log.contains("unknown datastore type: foo"), "{log}");
    assert_eq!(log, outcome.stderr);
    assert!(!log.contains(secret) && !outcome.stdout.contains(secret));
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(file.parent().unwrap()), mode(&file)), (0o755, 0o600));
    // The second plugin call appends its lines to the log file of the first plugin call. At log level `error`, a plugin
    // call logs one line less than at level `info`.
    call_binary(&environment("ADD"), conf("error", &path).as_bytes());
    assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), log.lines().count() * 2 - 1);
    // If the log file cannot be created, the plugin only reports so on standard error.
    let outcome = call_binary(&environment("ADD"), conf("info", "/proc/no/such/folder/log").as_bytes());
    assert_eq!(error_of(&outcome).1, "unknown datastore type: foo");
    assert!(outcome.stderr.contains("cannot open the log file that log_file_path names"), "{}", outcome.stderr);
}

#[test]
fn process_log_file_stays_within_limits() {
    const MEGABYTE: u64 = 1024 * 1024;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cni.log");
    // A plugin call writes two lines of 60 kB, so eight calls fill a log file.
    let name = "n".repeat(60_000);
    let call = |limits: &str| {
        let conf = format!(
            r#"{{"name":"{name}","type":"bridge","datastore_type":"redb","datastore_path":"{}","log_level":"debug","log_file_path":"{}"{limits}}}"#,
            folder.path().join("store").display(),
            file.display()
        );
        let outcome = call_binary(&environment("DEL"), conf.as_bytes());
        assert_eq!(outcome.exit, 0, "{outcome:?}");
        outcome.stderr.lines().filter(|line| line.contains(&name)).count()
    };
    let files = || {
        let mut files: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    let count = |file: &std::path::PathBuf| fs::read_to_string(file).unwrap().matches(&name).count();
    let limited = || call(r#","log_file_max_size":1,"LOG_FILE_MAX_COUNT":3,"log_file_max_age":null"#);
    // The log consists of three rotated files of 17 lines each, and the current file with the remaining lines.
    let said: usize = (0..30).map(|_| limited()).sum();
    assert_eq!((said, files().len(), files().iter().map(count).sum::<usize>()), (60, 4, 60));
    // The plugin removes the oldest log file when the current log file is full.
    let more: usize = (0..5).map(|_| limited()).sum();
    let rotated = files();
    assert_eq!((more, rotated.len(), rotated.iter().map(count).sum::<usize>()), (10, 4, 60 + 10 - 17));
    assert!(rotated.iter().all(|file| fs::metadata(file).unwrap().len() <= MEGABYTE), "{rotated:?}");
    let mode = |file: &std::path::PathBuf| fs::metadata(file).unwrap().permissions().mode() & 0o777;
    assert!(rotated.iter().all(|file| mode(file) == 0o600));
    // Without configured log limits, the default limits apply, and the log of this test stays below them.
    let before = count(&file);
    let more = call("");
    assert_eq!((files(), count(&file)), (rotated, before + more));
}

#[test]
fn process_input_is_refused_when_not_configuration() {
    let deep = "[".repeat(100_000);
    let nested = format!("{{\"name\":\"a\",\"x\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let long = " ".repeat((4 << 20) + 1);
    let inputs: [&[u8]; 8] = [
        b"",
        b"\xff\xfe",
        b"{\"name\":\"\xff\"}",
        b"{",
        deep.as_bytes(),
        nested.as_bytes(),
        long.as_bytes(),
        b"\xef\xbb\xbf{}",
    ];
    for input in inputs {
        let outcome = call_binary(&environment("ADD"), input);
        let (code, message, _) = error_of(&outcome);
        assert_eq!(code, 6, "{message}");
        assert!(message.starts_with("error unmarshall network config: "), "{message}");
        assert_eq!(outcome.stderr, "", "nothing is logged before there is a configuration");
    }
}

#[test]
fn process_input_is_refused_when_unreadable() {
    let output =
        Command::new(PROGRAM).env_clear().envs(environment("ADD")).stdin(File::open("/").unwrap()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("\"code\": 5"));
}
