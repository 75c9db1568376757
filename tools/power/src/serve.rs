//! Mounts a test disk, and answers the kernel's FUSE requests.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use nix::mount::{MntFlags, umount2};

use crate::changes::{File, Folder};
use crate::disk::{About, Disk, Kind, Node, State};

/// How long the kernel may cache an answer of the test disk. Cached answers stay valid, because only requests of this
/// kernel change the test disk.
const ALWAYS: Duration = Duration::from_secs(3600);
/// Maximum length in bytes of a file on the test disk, which keeps all files in memory.
const LONGEST: usize = 1 << 30;
/// The size of the test disk in blocks, as `statfs` reports it.
const BLOCKS: u64 = 1 << 20;
const BLOCK: u32 = 4096;
const UNIT: u64 = 512;
/// How often a sync that [`Disk::hang`] delays checks whether it may continue.
const HANG_INTERVAL: Duration = Duration::from_millis(5);

/// The FUSE server of a test disk, which answers the kernel's requests.
#[derive(Debug)]
struct Served {
    disk: Disk,
}

type Answer<T> = Result<T, Errno>;

impl Served {
    pub(crate) fn new(disk: Disk) -> Self {
        Self { disk }
    }

    /// Locks the disk's state for an operation that does not change the disk. Returns EIO if the power is cut.
    fn look(&self) -> Answer<MutexGuard<'_, State>> {
        let state = self.disk.state();
        if state.is_on() { Ok(state) } else { Err(Errno::EIO) }
    }

    /// Locks the disk's state for a change of the disk or a sync. Returns EIO if the power is cut.
    fn change(&self) -> Answer<MutexGuard<'_, State>> {
        let mut state = self.disk.state();
        if state.begin() { Ok(state) } else { Err(Errno::EIO) }
    }

    fn make(&self, request: &Request, parent: u64, name: &OsStr, mode: u32, kind: Kind) -> Answer<FileAttr> {
        let mut state = self.change()?;
        if folder(&mut state, parent)?.get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let mode = u16::try_from(mode & 0o7777).unwrap_or_default();
        let about = About { mode, uid: request.uid(), gid: request.gid(), changed: SystemTime::now() };
        let number = state.add(Node::new(about, kind));
        folder(&mut state, parent)?.add(name, number);
        touch(&mut state, parent);
        attributes(&state, number)
    }

    fn remove(&self, parent: u64, name: &OsStr, is_wanted: impl Fn(&Kind) -> Answer<()>) -> Answer<()> {
        let mut state = self.change()?;
        let number = folder(&mut state, parent)?.get(name).ok_or(Errno::ENOENT)?;
        is_wanted(&node(&state, number)?.kind)?;
        folder(&mut state, parent)?.remove(name);
        touch(&mut state, parent);
        Ok(())
    }

    fn move_within(&self, parent: u64, from: &OsStr, to: &OsStr, flags: RenameFlags) -> Answer<()> {
        let mut state = self.change()?;
        let names = folder(&mut state, parent)?;
        let (number, target) = (names.get(from).ok_or(Errno::ENOENT)?, names.get(to));
        if !(flags - RenameFlags::RENAME_NOREPLACE).is_empty() {
            return Err(Errno::EINVAL);
        }
        if let Some(target) = target {
            if flags.contains(RenameFlags::RENAME_NOREPLACE) {
                return Err(Errno::EEXIST);
            }
            match (&node(&state, number)?.kind, &node(&state, target)?.kind) {
                (Kind::File(_), Kind::File(_)) => {}
                (Kind::File(_), Kind::Folder(_)) => return Err(Errno::EISDIR),
                (Kind::Folder(_), Kind::File(_)) => return Err(Errno::ENOTDIR),
                (Kind::Folder(_), Kind::Folder(names)) if names.names().is_empty() => {}
                (Kind::Folder(_), Kind::Folder(_)) => return Err(Errno::ENOTEMPTY),
            }
        }
        if target != Some(number) {
            folder(&mut state, parent)?.rename(from, to);
            touch(&mut state, parent);
        }
        Ok(())
    }

    fn write_at(&self, number: u64, offset: u64, bytes: &[u8]) -> Answer<u32> {
        let mut state = self.change()?;
        let at = within(offset)?;
        within(offset + bytes.len() as u64)?;
        file(&mut state, number)?.write(at, bytes);
        touch(&mut state, number);
        u32::try_from(bytes.len()).map_err(|_| Errno::EFBIG)
    }

    fn read_at(&self, number: u64, offset: u64, size: u32) -> Answer<Vec<u8>> {
        let mut state = self.look()?;
        let content = file(&mut state, number)?.content();
        let from = within(offset)?.min(content.len());
        Ok(content[from..].iter().take(size as usize).copied().collect())
    }

    fn set_length(&self, number: u64, length: u64) -> Answer<()> {
        let mut state = self.change()?;
        let length = within(length)?;
        file(&mut state, number)?.set_length(length);
        touch(&mut state, number);
        Ok(())
    }

    fn allocate(&self, number: u64, offset: u64, length: u64, mode: i32) -> Answer<()> {
        if mode != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = self.look().and_then(|mut state| Ok(file(&mut state, number)?.content().len()))?;
        self.set_length(number, (offset + length).max(end as u64))
    }

    fn set_about(&self, number: u64, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>) -> Answer<FileAttr> {
        let mut state = self.look()?;
        let node = state.nodes.get_mut(&number).ok_or(Errno::ENOENT)?;
        let about = &mut node.about;
        about.mode = mode.and_then(|mode| u16::try_from(mode & 0o7777).ok()).unwrap_or(about.mode);
        (about.uid, about.gid) = (uid.unwrap_or(about.uid), gid.unwrap_or(about.gid));
        node.touch();
        attributes(&state, number)
    }

    fn list(&self, number: u64) -> Answer<FileHandle> {
        let mut state = self.look()?;
        let entries = folder(&mut state, number)?.names().iter().map(|(name, node)| (*node, name.clone()));
        let listing = [(number, ".".into()), (number, "..".into())].into_iter().chain(entries).collect();
        let handle = state.next;
        state.next += 1;
        state.listings.insert(handle, listing);
        Ok(FileHandle(handle))
    }

    fn sync(&self, number: u64) -> Answer<()> {
        self.change()?.sync(number);
        Ok(())
    }

    /// Answers a sync, after a possible wait for the end of [`Disk::hang`]. A separate thread waits for the end of
    /// [`Disk::hang`], so that other requests are answered meanwhile.
    fn answer_sync(&self, number: u64, reply: ReplyEmpty) {
        if !self.disk.state().hangs() {
            return reply_empty(reply, self.sync(number));
        }
        let served = Self { disk: self.disk.clone() };
        thread::spawn(move || {
            while served.disk.state().hangs() {
                thread::sleep(HANG_INTERVAL);
            }
            reply_empty(reply, served.sync(number));
        });
    }
}

fn node(state: &State, number: u64) -> Answer<&Node> {
    state.nodes.get(&number).ok_or(Errno::ENOENT)
}

fn file(state: &mut State, number: u64) -> Answer<&mut File> {
    state.file(number).ok_or(Errno::EINVAL)
}

fn folder(state: &mut State, number: u64) -> Answer<&mut Folder> {
    state.folder(number).ok_or(Errno::ENOTDIR)
}

fn touch(state: &mut State, number: u64) {
    if let Some(node) = state.nodes.get_mut(&number) {
        node.touch();
    }
}

fn within(offset: u64) -> Answer<usize> {
    usize::try_from(offset).ok().filter(|offset| *offset <= LONGEST).ok_or(Errno::EFBIG)
}

fn attributes(state: &State, number: u64) -> Answer<FileAttr> {
    let Node { about, kind, .. } = node(state, number)?;
    let (kind, size, nlink) = match kind {
        Kind::File(file) => (FileType::RegularFile, file.content().len() as u64, 1),
        Kind::Folder(_) => (FileType::Directory, 0, 2),
    };
    Ok(FileAttr {
        ino: INodeNo(number),
        size,
        blocks: size.div_ceil(UNIT),
        atime: about.changed,
        mtime: about.changed,
        ctime: about.changed,
        crtime: about.changed,
        kind,
        perm: about.mode,
        nlink,
        uid: about.uid,
        gid: about.gid,
        rdev: 0,
        blksize: BLOCK,
        flags: 0,
    })
}

fn reply_entry(reply: ReplyEntry, answer: Answer<FileAttr>) {
    match answer {
        Ok(attributes) => reply.entry(&ALWAYS, &attributes, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn reply_attributes(reply: ReplyAttr, answer: Answer<FileAttr>) {
    match answer {
        Ok(attributes) => reply.attr(&ALWAYS, &attributes),
        Err(error) => reply.error(error),
    }
}

fn reply_empty(reply: ReplyEmpty, answer: Answer<()>) {
    match answer {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.look().and_then(|mut state| {
            let number = folder(&mut state, parent.0)?.get(name).ok_or(Errno::ENOENT)?;
            attributes(&state, number)
        });
        reply_entry(reply, found);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply_attributes(reply, self.look().and_then(|state| attributes(&state, number.0)));
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let done = size.map_or(Ok(()), |size| self.set_length(number.0, size));
        reply_attributes(reply, done.and_then(|()| self.set_about(number.0, mode, uid, gid)));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.make(request, parent.0, name, mode & !umask, Kind::Folder(Folder::default()));
        reply_entry(reply, made);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.make(request, parent.0, name, mode & !umask, Kind::File(File::default())) {
            Ok(attributes) => {
                let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
                reply.created(&ALWAYS, &attributes, Generation(0), FileHandle(0), flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let is_wanted = |kind: &Kind| if matches!(kind, Kind::File(_)) { Ok(()) } else { Err(Errno::EISDIR) };
        reply_empty(reply, self.remove(parent.0, name, is_wanted));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let is_wanted = |kind: &Kind| match kind {
            Kind::Folder(folder) if folder.names().is_empty() => Ok(()),
            Kind::Folder(_) => Err(Errno::ENOTEMPTY),
            Kind::File(_) => Err(Errno::ENOTDIR),
        };
        reply_empty(reply, self.remove(parent.0, name, is_wanted));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = match parent == newparent {
            true => self.move_within(parent.0, name, newname, flags),
            false => Err(Errno::EXDEV),
        };
        reply_empty(reply, done);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.look() {
            Ok(_) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.read_at(number.0, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.write_at(number.0, offset, data) {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.answer_sync(number.0, reply);
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.list(number.0) {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = match self.look() {
            Ok(state) => state,
            Err(error) => return reply.error(error),
        };
        let listing = state.listings.get(&handle.0).map(Vec::as_slice).unwrap_or_default();
        for ((number, name), next) in listing.iter().zip(1..).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            let kind = attributes(&state, *number).map_or(FileType::RegularFile, |attributes| attributes.kind);
            if reply.add(INodeNo(*number), next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.disk.state().listings.remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.answer_sync(number.0, reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCK, 255, BLOCK);
    }

    fn fallocate(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.allocate(number.0, offset, length, mode));
    }
}

/// A mounted disk. Dropping this value unmounts the disk, even if a program still has a file on the disk open.
#[derive(Debug)]
pub struct Mounted {
    disk: Disk,
    at: PathBuf,
    session: Option<BackgroundSession>,
}

impl Mounted {
    pub(crate) fn new(disk: &Disk, at: &Path) -> io::Result<Self> {
        let mut config = Config::default();
        let name = MountOption::FSName("margay-power".to_owned());
        config.mount_options = vec![name, MountOption::DefaultPermissions, MountOption::NoAtime];
        config.acl = fuser::SessionACL::All;
        let session = fuser::spawn_mount(Served::new(disk.clone()), at, &config)?;
        Ok(Self { disk: disk.clone(), at: at.to_owned(), session: Some(session) })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // With the power cut, a process that still has a file on the disk open gets errors instead of hanging.
        self.disk.cut();
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
        drop(self.session.take());
    }
}
