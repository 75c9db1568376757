//! Tests which blocks of a cluster's store `margay gc` reads when it scans only for this node. The tests need root on
//! the host, not in a container.

use std::fs;
use std::path::PathBuf;

use datastore::{Create, Location};
use host::HeldBlocks;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels};
use ipam_core::model::{NewPool, Node};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, StoreExt};
use serde_json::Value;

use crate::common::{Done, TEST_TIMEOUT, margay};
use crate::support::Etcd;

/// A cluster with blocks of two addresses: too many blocks for the first scan to read all of them.
struct Cluster {
    etcd: Etcd,
    folder: tempfile::TempDir,
}

const BLOCKS: usize = 80;
/// Number of other nodes in the cluster; each node has at most 20 blocks.
const NODES: usize = 5;

impl Cluster {
    fn start() -> Self {
        let cluster = Self { etcd: Etcd::start().unwrap(), folder: tempfile::tempdir().unwrap() };
        cluster.with_ipam(async |ipam| {
            let others = (0..NODES).map(|number| format!("other{number}"));
            for name in others.chain(["mine".to_owned()]) {
                let node = Node::new(&name, Labels::default(), "uid", time::OffsetDateTime::UNIX_EPOCH);
                let key = keys::resource(ResourceKind::Node, &name);
                ipam.store().put(key, node.encode().unwrap()).await.unwrap();
            }
            let pool = NewPool::new("lab", "198.19.0.0/24".parse().unwrap()).with_block_size(31);
            ipam.create_pool(&pool, None, Deadline::after(TEST_TIMEOUT)).await.unwrap();
        });
        cluster
    }

    fn location(&self) -> Location {
        stores::at(&self.etcd.url().replace("http:", "etcd:")).unwrap()
    }

    fn with_ipam<T>(&self, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open = datastore::open(&self.location(), &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
            let done = work(&Ipam::new(open.store(), Nodes::Registered)).await;
            open.close().await.unwrap();
            done
        })
    }

    /// Assigns an address with an old timestamp and an earlier boot id.
    fn assign(&self, node: &str, container: &str, wanted: RequestedAddresses) -> String {
        let attachment = Attachment {
            network: "net".into(),
            container: container.into(),
            interface: "eth0".into(),
            node: node.into(),
            boot: Some("0badcafe".into()),
        };
        let mut request = AssignRequest::new(attachment, wanted);
        request.attributes.insert("timestamp".into(), "2020-01-01 00:00:00 +0000 UTC".into());
        let given = self.with_ipam(async |ipam| ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await);
        given.unwrap()[0].ip.to_string()
    }

    fn margay(&self, args: &str) -> Done {
        let looks = self.looks();
        let store = self.location().to_string();
        let words = ["--store", &store].into_iter().chain(args.split_whitespace());
        margay(words.chain(["--node", "mine", "--looks", looks.to_str().unwrap()]).map(str::to_owned))
    }

    fn looks(&self) -> PathBuf {
        self.folder.path().join("looks")
    }

    fn memory(&self) -> HeldBlocks {
        HeldBlocks::new(&self.looks(), &self.location().to_string(), "mine")
    }

    /// Returns the addresses that `gc` would free.
    fn candidates(&self, args: &str) -> Vec<String> {
        let report = self.margay(&format!("gc --boot -o json {args}")).json();
        let rows = report["stores"][0]["candidates"].as_array().unwrap().clone();
        rows.iter().map(|row| row["address"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the path of the file with the findings of earlier scans.
    fn file(&self) -> PathBuf {
        let folder = self.looks().read_dir().unwrap().map(|entry| entry.unwrap().path());
        folder.filter(|path| path.is_dir()).map(|path| path.join("held.json")).next().unwrap()
    }
}

#[test]
fn scan_reads_own_and_known_blocks_and_pass_finds_rest() {
    let cluster = Cluster::start();
    let lent = cluster.assign("other0", "o0", RequestedAddresses::any(1, 0));
    for number in 1..BLOCKS * 2 {
        cluster.assign(&format!("other{}", number % NODES), &format!("o{number}"), RequestedAddresses::any(1, 0));
    }
    let own = cluster.assign("mine", "own", RequestedAddresses::any(1, 0));
    // The node `mine` borrows an address from another node's block after that node has released the address. The plugin
    // has not recorded for `gc` that node `mine` has a borrowed address in another node's block.
    cluster.with_ipam(async |ipam| {
        let address = lent.parse().unwrap();
        ipam.release_ips(&[ipam_core::model::ReleaseRequest::new(address)], Deadline::after(TEST_TIMEOUT))
            .await
            .unwrap()
    });
    let borrowed = cluster.assign("mine", "borrowed", RequestedAddresses::these([lent.parse().unwrap()]));
    assert_eq!(borrowed, lent);
    assert_eq!(cluster.candidates(""), [own.as_str()], "a larger cluster is not gone through at once");
    let both = |mut found: Vec<String>| {
        found.sort();
        let mut expected = vec![own.clone(), borrowed.clone()];
        expected.sort();
        assert_eq!(found, expected);
    };
    both(cluster.candidates("--all-blocks"));
    // The full scan recorded that node `mine` has a borrowed address in another node's block, so that later scans read
    // this block as well.
    both(cluster.candidates(""));
    let node = cluster.margay("metrics").answer();
    for line in [
        r#"margay_node_blocks{pool="lab",cidr="198.19.0.0/24"} 1"#,
        r#"margay_node_addresses{pool="lab",cidr="198.19.0.0/24",state="in-use"} 2"#,
        r#"margay_node_addresses{pool="lab",cidr="198.19.0.0/24",state="borrowed"} 1"#,
        r#"margay_node_addresses{pool="lab",cidr="198.19.0.0/24",state="free"} 1"#,
        r#"margay_leaked_addresses{reason="earlier-boot"} 2"#,
    ] {
        assert!(node.lines().any(|found| found == line), "{line} is not in\n{node}");
    }
    assert!(!node.contains("margay_pool_"), "{node}");
    let all = cluster.margay("metrics --cluster").answer();
    assert!(all.contains(r#"margay_pool_borrowed_addresses{pool="lab",cidr="198.19.0.0/24"} 1"#), "{all}");
    assert!(all.contains("margay_nodes 6") && !all.contains("margay_node_"), "{all}");

    // If the file with scan findings is damaged, `gc` treats the file as empty, but still reads the plugin's notes
    // about used blocks.
    fs::write(cluster.file(), "{").unwrap();
    assert_eq!(cluster.candidates(""), [own.as_str()]);
    cluster.memory().note(&format!("{borrowed}/31")).unwrap();
    both(cluster.candidates(""));

    // `gc --all-blocks` runs a full scan, in contrast to the runs above. The first full scan reads all blocks; later
    // full scans read the node's known blocks and the blocks written since the previous full scan.
    both(cluster.candidates("--all-blocks"));
    let change = |name: &str, value: Value| {
        let mut stored: Value = serde_json::from_slice(&fs::read(cluster.file()).unwrap()).unwrap();
        stored[name] = value;
        fs::write(cluster.file(), stored.to_string()).unwrap();
    };
    for entry in cluster.file().parent().unwrap().read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path != cluster.file() {
            fs::remove_file(path).unwrap();
        }
    }
    change("blocks", Value::Array(Vec::new()));
    assert_eq!(cluster.candidates(""), [own.as_str()]);
    change("due", 0.into());
    assert_eq!(cluster.candidates(""), [own.as_str()], "it was not written since");
    change("due", 0.into());
    change("passed", Value::Null);
    both(cluster.candidates(""));
}
