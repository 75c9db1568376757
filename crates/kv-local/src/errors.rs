//! Creates the errors that opening a store's folder can return. Each error states the fault, the path, and the remedy.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv::{Error, ErrorKind, Operation, Revision};

use super::queue;

/// The URL and folder of a store, for error messages.
#[derive(Clone, Debug)]
pub(crate) struct StoreLabel {
    pub(crate) store: String,
    /// The absolute path of the store's folder.
    pub(crate) folder: PathBuf,
}

impl StoreLabel {
    pub(crate) fn io(&self, path: &Path, error: io::Error) -> Error {
        use io::ErrorKind as Io;
        let name = path.display();
        let (kind, detail) = match error.kind() {
            Io::PermissionDenied => {
                (ErrorKind::Io, no_permission(path, &self.folder, Path::new(SELINUX_FOLDER).is_dir()))
            }
            Io::ReadOnlyFilesystem => (ErrorKind::Io, read_only(path)),
            Io::NotADirectory | Io::AlreadyExists => {
                let is_file = |above: &&Path| above.symlink_metadata().is_ok_and(|found| !found.is_dir());
                let file = path.ancestors().find(is_file).unwrap_or(path).display();
                let detail =
                    format!("{file} is in the way: a store is a folder; give another path or move that file away");
                (ErrorKind::Io, detail)
            }
            Io::StorageFull | Io::QuotaExceeded => (ErrorKind::NoSpace, no_room(path)),
            _ => (ErrorKind::Io, format!("at {name}")),
        };
        self.error(kind, detail).with_source(error)
    }

    /// Returns the error for a missing store that the open options forbid to create.
    pub(crate) fn missing(&self) -> Error {
        self.error(ErrorKind::Missing, format!("nothing in {}", self.folder.display()))
    }

    pub(crate) fn damaged(&self, what: &str) -> Error {
        self.error(ErrorKind::Corrupt, self.advice(what))
    }

    /// Returns the error for a store whose newest revision is below the recorded one.
    pub(crate) fn regressed(&self, newest: Revision, seen: u64) -> Error {
        let folder = self.folder.display();
        let detail = format!(
            "it is at revision {newest} and was at {seen}, so its newest changes are gone; restore {folder} from a \
             backup, or, if an older state was put back on purpose, remove {folder}/head"
        );
        self.error(ErrorKind::RevisionRegressed, detail)
    }

    /// Adds advice to an error about damage or a full disk, unless the error already has a detail.
    pub(crate) fn advise(&self, error: Error) -> Error {
        match error.kind() {
            _ if error.detail().is_some() => error,
            ErrorKind::Corrupt => error.with_detail(self.advice("its content cannot be read")),
            ErrorKind::NoSpace => error.with_detail(no_room(&self.folder)),
            _ => error,
        }
    }

    fn advice(&self, what: &str) -> String {
        let folder = self.folder.display();
        format!("{what}; restore {folder} from a backup, or move it away to start with an empty store")
    }

    /// Returns the error for a folder that contains the store of another engine.
    pub(crate) fn other_engine(&self, engine: &str) -> Error {
        self.error(ErrorKind::Unsupported, store_of(&self.folder, engine))
    }

    /// Returns the error for a store folder on a file system that other machines may have mounted as well.
    pub(crate) fn shared_file_system(&self, name: &str) -> Error {
        let detail = format!(
            "{} is on {name}, where the locks that keep processes apart cannot be trusted: give a path on a disk of this \
             machine",
            self.folder.display()
        );
        self.error(ErrorKind::Unsupported, detail)
    }

    /// Returns the error for a store folder that contains another program's files.
    pub(crate) fn foreign_folder(&self, found: &str) -> Error {
        let detail = format!(
            "{} holds {found} and no store: give a folder that does not exist yet, or an empty one",
            self.folder.display()
        );
        self.error(ErrorKind::Unsupported, detail)
    }

    /// Returns the error for a store lock that was still taken when the maximum wait ended.
    pub(crate) fn late(&self, queue: &Path, wait: Duration) -> Error {
        let who = match queue::find_holder(queue) {
            Some(process) => format!("process {process} has it"),
            None => format!("`fuser -v {}` as root shows who has it", queue.display()),
        };
        let detail = format!("waited {wait:?} for its turn; {who}; try again, and end that process if it hangs");
        self.error(ErrorKind::Locked, detail)
    }

    pub(crate) fn error(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        Error::new(kind, Operation::Open, self.store.clone()).with_detail(detail)
    }
}

/// Returns the error detail for a folder that contains another engine's store.
pub fn store_of(folder: &Path, engine: &str) -> String {
    format!("{} holds a {engine} store: set datastore_type to {engine}", folder.display())
}

/// The path of a folder that exists only if SELinux is enabled.
const SELINUX_FOLDER: &str = "/sys/fs/selinux";

fn no_permission(path: &Path, folder: &Path, selinux: bool) -> String {
    let text = format!("no permission for {}: run this as root or as the owner of the store's files", path.display());
    if !selinux {
        return text;
    }
    let folder = folder.display();
    format!(
        "{text}; if it is, SELinux is in the way: `restorecon -Rv {folder}` labels the files as their place demands, and \
         `ausearch -m avc -ts recent` shows what was refused"
    )
}

pub(crate) fn read_only(path: &Path) -> String {
    format!(
        "{} is on a read-only file system, and a store must be able to write even to be read: mount it writable, or give \
         another path",
        path.display()
    )
}

fn no_room(path: &Path) -> String {
    format!("no room for {}: free some space and try again", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> StoreLabel {
        StoreLabel { store: "redb:///a/store".to_owned(), folder: "/a/store".into() }
    }

    #[test]
    fn system_errors_say_where_and_what_to_do() {
        let rows = [
            (io::ErrorKind::PermissionDenied, ErrorKind::Io, "run this as root"),
            (io::ErrorKind::ReadOnlyFilesystem, ErrorKind::Io, "read-only file system"),
            (io::ErrorKind::NotADirectory, ErrorKind::Io, "in the way"),
            (io::ErrorKind::AlreadyExists, ErrorKind::Io, "in the way"),
            (io::ErrorKind::StorageFull, ErrorKind::NoSpace, "free some space"),
            (io::ErrorKind::QuotaExceeded, ErrorKind::NoSpace, "free some space"),
            (io::ErrorKind::Other, ErrorKind::Io, "at /a/store/queue"),
        ];
        for (error, kind, text) in rows {
            let ours = label().io(Path::new("/a/store/queue"), error.into());
            assert_eq!(*ours.kind(), kind, "{error}");
            let all = ours.to_string();
            assert!(all.contains(text) && all.contains("/a/store/queue") && all.contains(&error.to_string()), "{all}");
        }
    }

    #[test]
    fn advice_names_labels_when_host_has_selinux() {
        let text = |selinux| no_permission(Path::new("/a/store/queue"), Path::new("/a/store"), selinux);
        assert!(text(true).contains("no permission for /a/store/queue: run this as root"), "{}", text(true));
        assert!(text(true).contains("`restorecon -Rv /a/store`"), "{}", text(true));
        assert!(!text(false).contains("SELinux"));
    }

    #[test]
    fn advice_names_shared_file_system() {
        let error = label().shared_file_system("NFS");
        assert_eq!(*error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(
            text.contains("/a/store is on NFS") && text.contains("give a path on a disk of this machine"),
            "{text}"
        );
    }

    #[test]
    fn advice_is_given_once_and_only_when_useful() {
        let plain = |kind| Error::new(kind, Operation::Range, "redb");
        let advised = label().advise(plain(ErrorKind::Corrupt));
        assert!(advised.to_string().contains("restore /a/store from a backup"), "{advised}");
        let detailed = label().advise(plain(ErrorKind::Corrupt).with_detail("page 7 is odd"));
        assert_eq!(detailed.detail(), Some("page 7 is odd"));
        assert!(label().advise(plain(ErrorKind::NoSpace)).detail().is_some());
        assert!(label().advise(plain(ErrorKind::Io)).detail().is_none());
    }
}
