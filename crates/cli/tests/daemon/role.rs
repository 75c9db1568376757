//! Roles that this test program plays in a separate process as another user.

use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use conformance::patient;
use wire::{FileId, Hello, StoreIdentity};

use crate::fake::greet;
use crate::lab::Lab;
use crate::programs::{Running, STRANGER, TEST_TIMEOUT};

const ROLE: &str = "MARGAY_DAEMON_TEST_ROLE";
const SOCKET: &str = "MARGAY_DAEMON_TEST_SOCKET";
/// Environment variable that contains the device and inode of the store's queue file. A process of another user cannot
/// look up the store's queue file itself.
const QUEUE: &str = "MARGAY_DAEMON_TEST_QUEUE";

/// Starts a process that plays a role as the user [`STRANGER`].
pub(crate) fn play(role: &str, lab: &Lab) -> Running {
    let FileId { device, inode } = FileId::at(&lab.store.join("queue")).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "role::as_another_user", "--ignored", "--nocapture"]).env(ROLE, role);
    command
        .env(SOCKET, lab.socket())
        .env(QUEUE, format!("{device} {inode}"))
        .uid(STRANGER)
        .gid(STRANGER)
        .current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(command, "")
}

#[test]
#[ignore = "it is a part of other tests, which start it as another user"]
fn as_another_user() {
    let socket = env::var(SOCKET).unwrap();
    match env::var(ROLE).unwrap().as_str() {
        "client" => {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.set_read_timeout(Some(patient(TEST_TIMEOUT))).unwrap();
            let mut said = Vec::new();
            // If the daemon closes the connection with data still unread, the client's next read returns an error.
            let _ = stream.read_to_end(&mut said);
            assert_eq!(said, b"", "a stranger was told something");
        }
        "listener" => {
            let listener = UnixListener::bind(&socket).unwrap();
            fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
            let queue = env::var(QUEUE).unwrap();
            let mut numbers = queue.split(' ').map(|number| number.parse().unwrap());
            let queue = FileId { device: numbers.next().unwrap(), inode: numbers.next().unwrap() };
            // If no client connects, the process that listens on the socket waits until the test kills it.
            let (mut stream, _) = listener.accept().unwrap();
            // The test's own listener, which is no daemon, sends the greeting of a daemon.
            greet(&mut stream, &Hello::new(StoreIdentity::Embedded { id: "any".to_owned(), queue }));
            stream.set_read_timeout(Some(patient(TEST_TIMEOUT))).unwrap();
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said);
            assert_eq!(said, b"", "a stranger got a request");
        }
        other => panic!("no role: {other}"),
    }
}
