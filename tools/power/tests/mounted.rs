//! Tests programs on a mounted test disk, and the disk images that are left after power cuts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, ExitCode};

use nix::fcntl::{FallocateFlags, FcntlArg, fallocate, fcntl};
use nix::libc;
use nix::mount::{MsFlags, mount};
use power::{Cut, Disk, Folders, Image, Mounted, Syncs};
use tempfile::TempDir;

fn main() -> ExitCode {
    let tests: [(&str, fn()); 9] = [
        ("programs_find_what_they_wrote", programs_find_what_they_wrote),
        ("names_change_as_elsewhere", names_change_as_elsewhere),
        ("locks_hold_between_openings", locks_hold_between_openings),
        ("synced_data_survives", synced_data_survives),
        ("names_survive_only_when_folder_is_synced", names_survive_only_when_folder_is_synced),
        ("lying_disk_keeps_nothing", lying_disk_keeps_nothing),
        ("power_fails_after_given_operations", power_fails_after_given_operations),
        ("nothing_stays_mounted", nothing_stays_mounted),
        ("tests_are_ignored_without_device_and_fail_in_ci", tests_are_ignored_without_device_and_fail_in_ci),
    ];
    power::main(tests.into_iter().map(|(name, test)| (name.to_owned(), Box::new(test) as _)).collect())
}

struct Ground {
    disk: Disk,
    // Fields are dropped in order of declaration, so the disk is unmounted before the folder with its mount point is
    // removed.
    _mounted: Mounted,
    folder: TempDir,
}

impl Ground {
    fn new(image: Image, syncs: Syncs) -> Self {
        let (disk, folder) = (Disk::new(image, syncs), tempfile::tempdir().unwrap());
        let mounted = disk.mount(folder.path()).unwrap();
        Self { disk, _mounted: mounted, folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Cuts the power, and returns a folder with the files of the disk image that remains.
    fn after_cut(&self, seed: u64, folders: Folders) -> TempDir {
        self.disk.cut();
        let left = tempfile::tempdir().unwrap();
        self.disk.after_cut(Cut { seed, folders }).copy_to(&left.path().join("disk")).unwrap();
        left
    }
}

fn synced(path: &Path, content: &[u8]) -> File {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.write_all(content).unwrap();
    file.sync_all().unwrap();
    file
}

fn programs_find_what_they_wrote() {
    let ground = Ground::new(Image::default(), Syncs::Kept);
    let path = ground.path().join("file");
    let mut file = synced(&path, b"hello");
    file.write_all_at(&[7; 300_000], 1_000_000).unwrap();
    file.seek(SeekFrom::Start(1_000_000)).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 300_000]);
    assert_eq!(&fs::read(&path).unwrap()[..7], b"hello\0\0");
    file.set_len(3).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hel");
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.blocks() * 512), (1 << 20, 1 << 20));
    let before = fs::metadata(&path).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_ne!((before.ctime(), before.ctime_nsec()), (after.ctime(), after.ctime_nsec()));
    file.sync_data().unwrap();
    fs::remove_file(&path).unwrap();
    file.write_all_at(b"gone", 0).unwrap();
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"gone", "a file without a name lives on while it is open");
}

fn names_change_as_elsewhere() {
    let ground = Ground::new(Image::default(), Syncs::Kept);
    let at = |name: &str| ground.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/a"), "a").unwrap();
    fs::write(at("folder/b"), "b").unwrap();
    fs::rename(at("folder/a"), at("folder/b")).unwrap();
    assert_eq!(fs::read(at("folder/b")).unwrap(), b"a");
    assert_eq!(fs::metadata(at("folder/a")).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(fs::remove_dir(at("folder")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    assert_eq!(fs::create_dir(at("folder")).unwrap_err().kind(), ErrorKind::AlreadyExists);
    let exclusive = OpenOptions::new().write(true).create_new(true).open(at("folder/b"));
    assert_eq!(exclusive.unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(fs::rename(at("folder/b"), at("b")).unwrap_err().kind(), ErrorKind::CrossesDevices);
    for number in 0..300 {
        fs::write(at(&format!("folder/{number}")), "").unwrap();
    }
    assert_eq!(fs::read_dir(at("folder")).unwrap().count(), 301);
    fs::remove_dir_all(at("folder")).unwrap();
    assert_eq!(fs::read_dir(ground.path()).unwrap().count(), 0);
}

fn locks_hold_between_openings() {
    let ground = Ground::new(Image::default(), Syncs::Kept);
    let path = ground.path().join("queue");
    let (one, other) = (synced(&path, b""), OpenOptions::new().read(true).write(true).open(&path).unwrap());
    let lock = |file: &File, kind: libc::c_int| {
        let lock = libc::flock {
            l_type: kind.try_into().unwrap(),
            l_whence: libc::SEEK_SET.try_into().unwrap(),
            l_start: 5,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).is_ok()
    };
    assert!(lock(&one, libc::F_WRLCK));
    assert!(!lock(&other, libc::F_RDLCK));
    assert!(lock(&one, libc::F_UNLCK));
    assert!(lock(&other, libc::F_RDLCK));
    one.try_lock().unwrap();
    assert!(other.try_lock().is_err());
    drop(one);
    other.try_lock().unwrap();
}

fn synced_data_survives() {
    for seed in 0..20 {
        let ground = Ground::new(Image::default(), Syncs::Kept);
        let file = synced(&ground.path().join("file"), &[1; 4096]);
        File::open(ground.path()).unwrap().sync_all().unwrap();
        file.write_all_at(&[2; 2048], 1024).unwrap();
        fs::write(ground.path().join("other"), "x").unwrap();
        let left = ground.after_cut(seed, Folders::Strict);
        assert_eq!(fs::read_dir(left.path().join("disk")).unwrap().count(), 1);
        let content = fs::read(left.path().join("disk/file")).unwrap();
        assert_eq!(content.len(), 4096);
        for (number, sector) in content.chunks(512).enumerate() {
            let may_be_new = (2..6).contains(&number);
            assert!(sector == [1; 512] || (may_be_new && sector == [2; 512]), "sector {number} is torn");
        }
        // A new disk created from the image after the power cut contains the file content that survived.
        let next = Ground::new(Image::of_folder(&left.path().join("disk")).unwrap(), Syncs::Kept);
        assert_eq!(fs::read(next.path().join("file")).unwrap(), content);
    }
}

fn names_survive_only_when_folder_is_synced() {
    let ground = Ground::new(Image::default(), Syncs::Kept);
    synced(&ground.path().join("file"), b"x");
    let left = ground.after_cut(1, Folders::Strict);
    assert_eq!(fs::read_dir(left.path().join("disk")).unwrap().count(), 0);
    let kept = (0..50).filter(|seed| {
        let ground = Ground::new(Image::default(), Syncs::Kept);
        synced(&ground.path().join("file"), b"x");
        ground.after_cut(*seed, Folders::Prefix).path().join("disk/file").exists()
    });
    assert!((1..50).contains(&kept.count()), "by chance");
}

fn lying_disk_keeps_nothing() {
    for (syncs, files) in [(Syncs::Ignored, 0), (Syncs::IgnoredForFolders, 0), (Syncs::Kept, 1)] {
        let ground = Ground::new(Image::default(), syncs);
        synced(&ground.path().join("file"), b"x");
        File::open(ground.path()).unwrap().sync_all().unwrap();
        let left = ground.after_cut(1, Folders::Strict);
        assert_eq!(fs::read_dir(left.path().join("disk")).unwrap().count(), files, "{syncs:?}");
    }
}

fn power_fails_after_given_operations() {
    let ground = Ground::new(Image::default(), Syncs::Kept);
    ground.disk.cut_after(3);
    let file = synced(&ground.path().join("file"), b"x");
    assert_eq!(ground.disk.operations(), 3, "made, written, synced");
    assert_eq!(ground.disk.unsynced(), [Path::new("/")], "the file has no name yet that is durable");
    assert_eq!(ground.disk.before_cut(|| 1), Some(1));
    assert!(file.write_all_at(b"y", 0).is_err());
    assert!(ground.disk.is_cut());
    assert_eq!(ground.disk.before_cut(|| 1), None);
    assert!(fs::read_dir(ground.path()).is_err());
    ground.disk.undo_cut();
    assert_eq!(fs::read(ground.path().join("file")).unwrap(), b"x", "the write that failed was not done");
    file.write_all_at(b"z", 0).unwrap();
    assert_eq!(fs::read(ground.path().join("file")).unwrap(), b"z");
}

fn nothing_stays_mounted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let disk = Disk::new(Image::default(), Syncs::Kept);
    let mounted = disk.mount(&path).unwrap();
    let file = File::create(path.join("file")).unwrap();
    assert!(mounts().contains(path.to_str().unwrap()));
    drop(mounted);
    assert!(!mounts().contains(path.to_str().unwrap()), "also while a file is open");
    drop(file);
}

fn tests_are_ignored_without_device_and_fail_in_ci() {
    // Only this test's mount namespace loses `/dev/fuse`; processes of other tests still see the real one.
    mount(Some("/dev/null"), "/dev/fuse", None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    let run = |ci: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", "nothing_stays_mounted"]).env("CI", ci).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (is_success, said) = run("");
    assert!(is_success && said.contains("no disk can be mounted here") && said.contains("1 ignored"), "{said}");
    let (is_success, said) = run("true");
    assert!(!is_success && said.contains("no disk can be mounted here") && said.contains("1 failed"), "{said}");
}
