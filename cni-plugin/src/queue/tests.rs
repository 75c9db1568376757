//! The queue as files: who is found, what becomes of what is left, and what is nobody's.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use ipam_core::assign::{Bridge, Gateway, Wanted};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::intents::tests::attachment;

fn request(container: &str) -> AssignRequest {
    AssignRequest::new(attachment(container), Wanted::any(1, 0))
}

/// One that says something about everything.
fn full_request() -> AssignRequest {
    let mut request = AssignRequest::new(attachment("c"), Wanted::any(1, 1));
    request.attributes = [("pod".to_owned(), "p".to_owned()), ("timestamp".to_owned(), "now".to_owned())].into();
    request.v4_pools = vec!["one".to_owned(), "10.0.0.0/24".to_owned()];
    request.v6_pools = vec!["two".to_owned()];
    request.max_blocks = 1;
    request.bridge = Some(Bridge { v4: Gateway::At("10.0.0.1".parse().unwrap()), v6: Gateway::First });
    request
}

fn queue_at(folder: &Path, url: &str) -> Queue {
    Queue::new(folder, &url.parse().unwrap(), &attachment("any"))
}

fn queue(folder: &Path) -> Queue {
    queue_at(folder, "etcd://h:1")
}

fn assigned() -> Vec<Assigned> {
    let one = |ip: &str, block: &str, gateway: Option<&str>| Assigned {
        ip: ip.parse().unwrap(),
        block: block.parse().unwrap(),
        pool: block.parse().unwrap(),
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
    };
    vec![one("10.0.0.7", "10.0.0.0/26", Some("10.0.0.1")), one("fd00::7", "fd00::/122", None)]
}

fn containers(waiting: &[Waiting]) -> Vec<&str> {
    let mut names: Vec<_> = waiting.iter().map(|waiting| waiting.request.attachment.container.as_str()).collect();
    names.sort_unstable();
    names
}

fn count(folder: &Path) -> usize {
    folder.read_dir().unwrap().count()
}

#[tokio::test]
async fn a_request_comes_as_it_was_and_so_does_its_answer() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(&folder.path().join("run/queue"));
    assert!(queue.gather(&request("own")).is_empty());
    let ticket = queue.wait(&full_request()).unwrap();
    let waiting = queue.gather(&request("own"));
    // It has no equality: all that it is shows in here.
    assert_eq!(format!("{:?}", waiting[0].request), format!("{:?}", full_request()));
    assert!(waiting[0].still_waits());
    waiting[0].answer(Some(&assigned()));
    call(&waiting);
    ticket.called().await;
    assert!(queue.gather(&request("own")).is_empty(), "it was answered");
    assert_eq!(ticket.end(), Answer::Assigned(assigned()));
    assert_eq!(count(&queue.folder), 0);
    assert!(!waiting[0].still_waits());

    let ticket = queue.wait(&request("c")).unwrap();
    let waiting = queue.gather(&request("own"));
    waiting[0].answer(None);
    call(&waiting);
    // Anybody may call; it says nothing.
    net::UnixDatagram::unbound()
        .unwrap()
        .send_to_addr(&[1, 2], &address(ticket.path.file_name().unwrap().to_str().unwrap()).unwrap())
        .unwrap();
    let called = tokio::time::timeout(std::time::Duration::from_millis(50), ticket.called());
    assert!(called.await.is_err(), "it has to wait for the lock");
    assert_eq!(ticket.end(), Answer::Alone);
    let ticket = queue.wait(&request("c")).unwrap();
    assert_eq!(ticket.end(), Answer::Nothing);
    assert_eq!(count(&queue.folder), 0);
}

#[tokio::test]
async fn requests_are_their_owners_alone() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(&folder.path().join("queue"));
    let ticket = queue.wait(&request("c")).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&queue.folder), mode(&ticket.path)), (0o700, 0o600));
}

#[tokio::test]
async fn only_who_asks_for_nothing_special_of_the_same_store_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(folder.path());
    let with = |change: fn(&mut AssignRequest)| {
        let mut request = request("special");
        change(&mut request);
        request
    };
    let special = [
        with(|request| request.wanted.these.push("10.0.0.7".parse().unwrap())),
        with(|request| request.namespace = ipam_core::assign::NamespaceLabels::NotYetRead),
        with(|request| drop(request.namespace_labels.insert("a".to_owned(), "b".to_owned()))),
        with(|request| request.usage = ipam_core::model::PoolUse::Tunnel),
        with(|request| request.wanted.any_v4 = 256),
    ];
    for special in &special {
        assert!(queue.wait(special).is_none(), "{special:?}");
    }
    let _waits = queue.wait(&request("c")).unwrap();
    for special in &special[..4] {
        assert!(queue.gather(special).is_empty(), "{special:?}");
    }
    assert_eq!(containers(&queue.gather(&request("own"))), ["c"]);
    // Itself, and another call of its own.
    assert!(queue.gather(&request("c")).is_empty());
    let _again = queue.wait(&request("c")).unwrap();
    let _other = queue.wait(&request("d")).unwrap();
    assert_eq!(containers(&queue.gather(&request("own"))), ["c", "d"]);

    for url in ["etcd://h:2", "etcd+https://h:1", "etcd://h:1,h:2"] {
        assert!(queue_at(folder.path(), url).gather(&request("own")).is_empty(), "{url}");
    }
    for (network, node) in [("other", "n"), ("net", "other")] {
        let other = Attachment { network: network.to_owned(), node: node.to_owned(), ..attachment("c") };
        assert!(Queue::new(folder.path(), &"etcd://h:1".parse().unwrap(), &other).gather(&request("own")).is_empty());
    }
    assert_eq!(count(folder.path()), 3);
}

#[tokio::test]
async fn who_comes_in_as_somebody_else_is_not_found_and_no_secret_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let login = |user: &str, password: &str| {
        let mut etcd = datastore::Etcd { endpoints: vec!["http://h:1".to_owned()], ..datastore::Etcd::default() };
        etcd.access.login = Some(datastore::Login { user: user.to_owned(), password: password.to_owned() });
        Queue::new(folder.path(), &Location::Etcd(etcd), &attachment("any"))
    };
    let ticket = login("anna", "hidden").wait(&request("c")).unwrap();
    let written = fs::read(&ticket.path).unwrap();
    assert!(!String::from_utf8_lossy(&written).contains("hidden"));
    assert_eq!(containers(&login("anna", "hidden").gather(&request("own"))), ["c"]);
    assert!(login("otto", "hidden").gather(&request("own")).is_empty());
    assert!(queue(folder.path()).gather(&request("own")).is_empty());
}

#[tokio::test]
async fn what_is_left_of_the_dead_is_removed_by_whoever_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(folder.path());
    let ticket = queue.wait(&request("dead")).unwrap();
    let waiting = queue.gather(&request("own"));
    let left = folder.path().join("left");
    fs::rename(&ticket.path, &left).unwrap();
    drop(ticket);
    assert!(!waiting[0].still_waits());
    fs::write(folder.path().join("garbage"), "garbage").unwrap();
    fs::write(folder.path().join("large"), vec![0; 1 << 20]).unwrap();
    let _waits = queue.wait(&request("c")).unwrap();
    assert!(queue_at(folder.path(), "etcd://h:2").gather(&request("own")).is_empty());
    assert_eq!(count(folder.path()), 1);
    assert_eq!(containers(&queue.gather(&request("own"))), ["c"]);
}

#[tokio::test]
async fn what_is_no_request_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(folder.path());
    let ticket = queue.wait(&request("c")).unwrap();
    let whole = fs::read(&ticket.path).unwrap();
    // Locked as one that waits, each under a name of this queue.
    let held = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(format!("{}{name}", queue.prefix()));
        fs::write(&path, bytes).unwrap();
        let file = File::open(&path).unwrap();
        file.lock().unwrap();
        file
    };
    let mut files = Vec::new();
    for length in 0..whole.len() {
        files.push(held(&format!("cut{length}"), &whole[..length]));
        let mut changed = whole.clone();
        changed[length] ^= 0x40;
        files.push(held(&format!("changed{length}"), &changed));
    }
    files.push(held("large", &[whole.clone(), vec![0; MAX_BYTES]].concat()));
    files.push(held("answered", &[whole, vec![0]].concat()));
    fs::create_dir(folder.path().join(format!("{}folder", queue.prefix()))).unwrap();
    symlink(&ticket.path, folder.path().join(format!("{}link", queue.prefix()))).unwrap();
    mkfifo(&folder.path().join(format!("{}fifo", queue.prefix())), Mode::S_IRWXU).unwrap();
    let there = count(folder.path());
    assert_eq!(containers(&queue.gather(&request("own"))), ["c"]);
    assert_eq!(count(folder.path()), there, "nothing of it is ours to remove");
}

#[tokio::test]
async fn no_more_are_found_than_a_commit_has_room_for() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue(folder.path());
    let tickets: Vec<_> = (0..MOST + 9).map(|number| queue.wait(&request(&format!("c{number}"))).unwrap()).collect();
    assert_eq!(queue.gather(&request("own")).len(), MOST);
    drop(tickets);
    assert!(queue.gather(&request("own")).is_empty());
}

#[tokio::test]
async fn where_there_can_be_no_queue_nobody_waits_in_one() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let queue = queue(&folder.path().join("file/queue"));
    assert!(queue.wait(&request("c")).is_none());
    assert!(queue.gather(&request("own")).is_empty());
}
