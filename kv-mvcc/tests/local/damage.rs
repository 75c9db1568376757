//! Damaged stores, by the hundred: each is either read exactly right or refused, and nothing panics or hangs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kv::{ErrorKind, Outcome, Result};
use kv_mvcc::local::Engine;

use super::{check, create, open, process, role, role_path, run, step};

/// Steps in the store that is damaged.
const STEPS: u64 = 60;
/// How long one damaged store may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Flips bits, cuts, blanks and removes, anywhere. `test` is the name of the test that calls this; each damaged store
/// is opened in a process of its own, so that a hang, an abort or a broken engine's threads are seen for what they are.
pub fn a_damaged_store_is_right_or_refused(engine: &dyn Engine, test: &str) {
    if role().as_deref() == Some("examine") {
        return examine(engine);
    }
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good");
    make(engine, &good);
    // Another seed gives other damage: DAMAGE_SEED=7 DAMAGE_ROUNDS=5000.
    let mut random = Random(number("DAMAGE_SEED", 0x5eed));
    let (mut right, mut refused) = (0, 0);
    for round in 0..number("DAMAGE_ROUNDS", 300) {
        let bad = folder.path().join("bad");
        let _ = fs::remove_dir_all(&bad);
        copy(&good, &bad);
        let what = damage(&bad, &mut random);
        let verdict = examination(test, &bad, &what);
        match verdict.split_once(' ').map_or(verdict.as_str(), |(word, _)| word) {
            "right" => right += 1,
            "refused" => refused += 1,
            _ => panic!("round {round}: {what}: {verdict}"),
        }
    }
    println!("{right} right, {refused} refused");
    assert!(right > 10 && refused > 10, "{right} right, {refused} refused: the damage is not random enough");
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn make(engine: &dyn Engine, path: &Path) {
    for n in 0..STEPS {
        // Now and then another process, as plugins do.
        let store = create(engine, path).unwrap();
        run(async {
            step(&store, n).await.unwrap();
            store.close().await.unwrap();
        });
    }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

/// All files below a folder but the queue, which is empty, in a fixed order.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if !path.ends_with("queue") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A small generator of numbers, so that a round can be had again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound.max(1)
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(u64::try_from(bound).unwrap())).unwrap()
    }
}

/// Damages one file and says how.
fn damage(folder: &Path, random: &mut Random) -> String {
    let files = files(folder);
    let file = &files[random.index(files.len())];
    let mut bytes = fs::read(file).unwrap();
    let length = bytes.len();
    let what = match random.below(6) {
        0 | 1 => {
            let count = 1 + random.below(8);
            for _ in 0..count {
                bytes[random.index(length)] ^= 1 << random.below(8);
            }
            format!("{count} bits flipped")
        }
        // Where a file begins is where it says what it is.
        2 => {
            let at = random.index(length.min(512));
            bytes[at] ^= 1 << random.below(8);
            format!("bit flipped at {at}")
        }
        3 => {
            bytes.truncate(random.index(length));
            format!("cut to {}", bytes.len())
        }
        4 => {
            let start = random.index(length);
            let end = length.min(start + 1 + random.index(8192));
            bytes[start..end].fill(if random.below(2) == 0 { 0 } else { 0xff });
            format!("{start} to {end} blanked")
        }
        _ => {
            fs::remove_file(file).unwrap();
            return format!("{} removed", file.display());
        }
    };
    fs::write(file, bytes).unwrap();
    format!("{}: {what}", file.display())
}

fn examination(test: &str, path: &Path, what: &str) -> String {
    let mut child = process(test, "examine", path).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait(&mut child, what);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let verdict = text.lines().find_map(|line| line.strip_prefix("verdict: ")).map(str::to_owned);
    verdict.unwrap_or_else(|| format!("{}: {text}", output.status))
}

fn wait(child: &mut Child, what: &str) {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("{what}: it hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn examine(engine: &dyn Engine) {
    let path = role_path();
    println!("verdict: {}", run(verdict(engine, &path)));
}

async fn verdict(engine: &dyn Engine, path: &Path) -> String {
    match use_twice(engine, path).await {
        Ok(Ok(())) => "right".to_owned(),
        Ok(Err(wrong)) => format!("wrong {wrong}"),
        Err(error) if is_typed(&error) => format!("refused {error}"),
        Err(error) => format!("odd {error}"),
    }
}

/// Reads all, writes, and reads all again after opening the store once more.
async fn use_twice(engine: &dyn Engine, path: &Path) -> Result<Result<(), String>> {
    let store = open(engine, path)?;
    if let Err(wrong) = check(&store, STEPS).await? {
        return Ok(Err(wrong));
    }
    step(&store, STEPS).await?;
    store.close().await?;
    let store = open(engine, path)?;
    check(&store, STEPS + 1).await
}

fn is_typed(error: &kv::Error) -> bool {
    match error.kind() {
        ErrorKind::Corrupt
        | ErrorKind::RevisionRegressed
        | ErrorKind::UnknownFormat { .. }
        | ErrorKind::Unsupported => true,
        ErrorKind::CommitIo | ErrorKind::Poisoned => error.outcome() == Outcome::Unknown,
        _ => false,
    }
}
