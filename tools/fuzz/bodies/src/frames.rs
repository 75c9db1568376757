//! Checks how the client and the daemon read arbitrary bytes from the daemon's private socket.

use serde::Serialize;
use serde::de::DeserializeOwned;
use wire::{Frame, FrameKind, Hello, MAX_REQUEST_BODY_BYTES, StallReport, keys};

/// Runs the fuzz target `frames` on bytes that a client or a daemon has sent.
pub fn frames(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut stream = data;
        while let Ok(Some(frame)) = Frame::read(&mut stream, MAX_REQUEST_BODY_BYTES).await {
            look(&frame);
        }
    });
}

fn look(frame: &Frame) {
    let again = Frame::read_from(&frame.to_bytes()).unwrap();
    assert_eq!(again, *frame);
    match frame.kind {
        FrameKind::Hello => same::<Hello>(frame),
        FrameKind::Verb => same::<agent::VerbRequest>(frame),
        FrameKind::Keys => same::<keys::TimedRequest>(frame),
        FrameKind::Answer => {
            same::<agent::Answer>(frame);
            same::<keys::StoreReply>(frame);
        }
        FrameKind::Alive => same::<StallReport>(frame),
        FrameKind::Taken | FrameKind::Yield => {}
    }
}

/// If the body of a frame can be decoded, checks that it encodes and decodes to an equal value.
fn same<T: Serialize + DeserializeOwned>(frame: &Frame) {
    let Ok(body) = frame.decode::<T>() else { return };
    let written = Frame::new(frame.kind, &body).unwrap();
    let read: T = written.decode().unwrap();
    assert_eq!(Frame::new(frame.kind, &read).unwrap(), written);
}
