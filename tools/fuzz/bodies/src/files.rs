//! Checks stores on disk in which one file is damaged. A damaged store must be read correctly or rejected.

use std::fs;
use std::path::{Path, PathBuf};

use arbitrary::{Result, Unstructured};
use backend_redb::Redb;
use backend_sled::Sled;
use kv::{ErrorKind, Op, Outcome, Range, Store, StoreExt, Txn};
use kv_local::{Create, Engine, OpenOptions, open_blocking};
use kv_mvcc::{Blocking, MvccStore};

use crate::store::block_on;

/// The undamaged stores that the target damages, in the format of [`pack`].
const STORES: [(&dyn Engine, &[u8]); 2] =
    [(&Redb, include_bytes!("../../stores/redb.pack")), (&Sled, include_bytes!("../../stores/sled.pack"))];

/// The number of transactions in each of the packed stores of [`STORES`].
const STEPS: u64 = 12;

/// Silences the panic hook: some engines panic over damaged files, and the store turns these panics into errors. Panics
/// of the engine are caught, but a panic in [`damaged_file`] itself fails the fuzz run.
pub fn quiet_engines() {
    std::panic::set_hook(Box::new(|_| {}));
}

/// Runs the fuzz target `damaged_file` on an input. The input chooses an engine, a file of that engine's store, and how
/// this file is damaged.
pub fn damaged_file(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let (engine, packed) = STORES[usize::from(input.arbitrary::<u8>().unwrap()) % STORES.len()];
    let mut files = unpack(packed);
    let choice = usize::from(input.arbitrary::<u8>().unwrap()) % files.len();
    let what = damage(&mut files, choice, &mut input).unwrap();
    let folder = scratch();
    write(folder.path(), &files);
    match block_on(use_twice(engine, folder.path())) {
        Ok(Ok(())) => {}
        Ok(Err(wrong)) => complain(&what, &wrong),
        Err(error) if is_typed(&error) => {}
        Err(error) => complain(&what, &error.to_string()),
    }
}

fn complain(what: &str, wrong: &str) {
    // The panic hook may be silenced, so the failure is printed here.
    #[expect(clippy::print_stderr, reason = "prints the error before the process exits")]
    {
        eprintln!("{what}: {wrong}");
    }
    panic!("{what}: {wrong}");
}

/// Creates a temporary folder, on a file system in memory if possible.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn write(folder: &Path, files: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

/// Damages one file of a store, and returns a description of the damage.
fn damage(files: &mut Vec<(PathBuf, Vec<u8>)>, choice: usize, input: &mut Unstructured<'_>) -> Result<String> {
    let (path, bytes) = &mut files[choice];
    let mut what = path.display().to_string();
    let written = written_parts(bytes);
    while !input.is_empty() && !bytes.is_empty() {
        // Large parts of a file are zeros, so most of the damaged bytes are chosen from the parts that are not zero.
        let at = match input.arbitrary::<u32>()? as usize {
            at if at % 8 == 0 || written.is_empty() => (at / 8) % bytes.len(),
            at => written[(at / 8) % written.len()].min(bytes.len() - 1),
        };
        match input.int_in_range(0..=7)? {
            0..=2 => {
                let bit = input.int_in_range(0..=7)?;
                bytes[at] ^= 1 << bit;
                what.push_str(&format!(", bit {bit} at {at} flipped"));
            }
            3 | 4 => {
                let new = input.bytes(input.len().min(8))?;
                let end = bytes.len().min(at + new.len());
                bytes[at..end].copy_from_slice(&new[..end - at]);
                what.push_str(&format!(", {at} to {end} overwritten"));
            }
            5 => {
                bytes.truncate(at);
                what.push_str(&format!(", cut to {at}"));
            }
            6 => {
                let end = bytes.len().min(at + usize::from(input.arbitrary::<u16>()?));
                bytes[at..end].fill(if input.arbitrary()? { 0 } else { 0xff });
                what.push_str(&format!(", {at} to {end} blanked"));
            }
            _ => {
                let from = input.arbitrary::<u32>()? as usize % bytes.len();
                let len = usize::from(input.arbitrary::<u16>()?).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + len, at);
                what.push_str(&format!(", {len} bytes copied from {from} to {at}"));
            }
        }
    }
    if bytes.is_empty() {
        files.remove(choice);
        what.push_str(", removed");
    }
    Ok(what)
}

/// Returns the positions in a file of all bytes that are not zero.
fn written_parts(bytes: &[u8]) -> Vec<usize> {
    bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).map(|(at, _)| at).collect()
}

fn open(engine: &dyn Engine, path: &Path, create: Create) -> kv::Result<MvccStore> {
    open_blocking(engine, path, &OpenOptions::default().with_create(create).with_blocking(Blocking::InPlace))
}

/// Reads the whole store, writes to it, reopens it, and reads all of it again.
async fn use_twice(engine: &dyn Engine, path: &Path) -> kv::Result<std::result::Result<(), String>> {
    let store = open(engine, path, Create::Never)?;
    if let Err(wrong) = check(&store, STEPS).await? {
        return Ok(Err(wrong));
    }
    step(&store, STEPS).await?;
    store.close().await?;
    let store = open(engine, path, Create::Never)?;
    check(&store, STEPS + 1).await
}

fn value(n: u64) -> Vec<u8> {
    let length = if n % 4 == 3 { 7000 } else { 40 };
    n.to_be_bytes().into_iter().cycle().take(length).collect()
}

async fn step(store: &MvccStore, n: u64) -> kv::Result<()> {
    let txn = Txn::new().with_success([Op::put(format!("k{}", n % 5), value(n)), Op::put("newest", value(n))]);
    store.txn(txn).await.map(drop)
}

/// Compares the store with the content that it must have after the transactions with numbers below `n`. The inner error
/// describes the first difference from the expected content.
async fn check(store: &MvccStore, n: u64) -> kv::Result<std::result::Result<(), String>> {
    let found: Vec<(String, Vec<u8>)> =
        store.list(Range::All).await?.kvs.iter().map(|kv| (kv.key.to_string(), kv.value.as_bytes().to_vec())).collect();
    let mut expected: Vec<(String, Vec<u8>)> = (n - 5..n).map(|n| (format!("k{}", n % 5), value(n))).collect();
    expected.sort();
    expected.push(("newest".to_owned(), value(n - 1)));
    let keys = |rows: &[(String, Vec<u8>)]| rows.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
    Ok(if found == expected { Ok(()) } else { Err(format!("wrong content: {:?}", keys(&found))) })
}

fn is_typed(error: &kv::Error) -> bool {
    match error.kind() {
        ErrorKind::Corrupt
        | ErrorKind::RevisionRegressed
        | ErrorKind::UnknownFormat { .. }
        | ErrorKind::Missing
        | ErrorKind::Unsupported => true,
        ErrorKind::CommitIo | ErrorKind::Poisoned => error.outcome() == Outcome::Unknown,
        _ => false,
    }
}

/// Creates a store of the named engine, and packs its files for `tools/fuzz/stores`.
pub fn packed_store(name: &str) -> Vec<u8> {
    let (engine, _) = STORES.into_iter().find(|(engine, _)| engine.name() == name).unwrap();
    let folder = scratch();
    let path = folder.path().join("store");
    for n in 0..STEPS {
        let store = open(engine, &path, Create::IfMissing).unwrap();
        block_on(async {
            step(&store, n).await.unwrap();
            store.close().await.unwrap();
        });
    }
    let mut files = Vec::new();
    collect(&path, &path, &mut files);
    files.sort();
    pack(&files)
}

/// Collects all files in a folder and its subfolders, except the stores' queue files.
fn collect(root: &Path, folder: &Path, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else if path.file_name().is_some_and(|name| name != "queue") {
            files.push((path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap()));
        }
    }
}

/// The size in bytes of the pieces into which files are split for packing. A packed file does not contain the pieces
/// that are all zeros.
const PIECE: usize = 64;

/// Packs several files into one byte string. For each file, the byte string contains the lengths of its path and
/// content, its path, and its pieces that are not all zeros. In a packed file, each piece is preceded by its number,
/// and the piece number `u32::MAX` marks the end. In a packed file, lengths and piece numbers are 4-byte little-endian
/// integers.
fn pack(files: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let number = |number: usize| u32::try_from(number).unwrap().to_le_bytes();
    let mut packed = Vec::new();
    for (path, bytes) in files {
        let path = path.to_str().unwrap().as_bytes();
        packed.extend(number(path.len()));
        packed.extend(number(bytes.len()));
        packed.extend(path);
        for (place, piece) in bytes.chunks(PIECE).enumerate().filter(|(_, piece)| piece.iter().any(|byte| *byte != 0)) {
            packed.extend(number(place));
            packed.extend(piece);
        }
        packed.extend(u32::MAX.to_le_bytes());
    }
    packed
}

/// The rest of the packed files, which has not been read yet.
struct Packed(&'static [u8]);

impl Packed {
    fn take(&mut self, count: usize) -> &'static [u8] {
        self.0.split_off(..count).unwrap()
    }

    fn number(&mut self) -> usize {
        u32::from_le_bytes(self.take(4).try_into().unwrap()) as usize
    }

    fn file(&mut self) -> (PathBuf, Vec<u8>) {
        let (path, length) = (self.number(), self.number());
        let path = PathBuf::from(std::str::from_utf8(self.take(path)).unwrap());
        let mut bytes = vec![0; length];
        loop {
            let place = self.number();
            if place == u32::MAX as usize {
                return (path, bytes);
            }
            let (start, end) = (place * PIECE, length.min((place + 1) * PIECE));
            bytes[start..end].copy_from_slice(self.take(end - start));
        }
    }
}

fn unpack(packed: &'static [u8]) -> Vec<(PathBuf, Vec<u8>)> {
    let mut packed = Packed(packed);
    let mut files = Vec::new();
    while !packed.0.is_empty() {
        files.push(packed.file());
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Undamaged stores must pass the fuzz target, so that any failure is due to the damage.
    #[test]
    fn packed_stores_pass_without_damage() {
        for (engine, packed) in STORES {
            let folder = scratch();
            write(folder.path(), &unpack(packed));
            assert_eq!(block_on(use_twice(engine, folder.path())).unwrap(), Ok(()), "{}", engine.name());
        }
    }

    #[test]
    fn packed_file_is_unpacked_as_it_was() {
        let mut packed = Vec::new();
        for bytes in [&b"x"[..], &[0; 200], &[[0; 64].as_slice(), b"middle", &[0; 130], b"end"].concat()] {
            packed.push((PathBuf::from("a/b"), bytes.to_vec()));
        }
        assert_eq!(unpack(pack(&packed).leak()), packed);
    }
}
