//! A program that connects to etcd and commits one transaction of two puts: the minimum work of any program that
//! changes a block and a handle in etcd.
//!
//! Usage: floor-etcd URL NAME

use std::error::Error;

use etcd_client::{Client, Txn, TxnOp};

/// Size in bytes of the block that an ADD writes on a node with 40 containers.
const BLOCK_BYTES: usize = 9_000;
const HANDLE_BYTES: usize = 90;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), Some(name)) = (arguments.next(), arguments.next()) else {
        return Err("usage: floor-etcd URL NAME".into());
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client = Client::connect([url], None).await?;
        let block = TxnOp::put("floor/block", vec![b'x'; BLOCK_BYTES], None);
        let handle = TxnOp::put(format!("floor/handle/{name}"), vec![b'x'; HANDLE_BYTES], None);
        client.txn(Txn::new().and_then([block, handle])).await?;
        Ok(())
    })
}
