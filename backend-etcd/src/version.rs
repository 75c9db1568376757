//! Which servers are new enough.

use kv::Result;

use crate::options::refused;

/// The oldest that has all that is asked of it.
const OLDEST: [u32; 2] = [3, 4];

/// Versions from which on a deletion at the compaction mark is kept in the history; before, a watch can miss it.
const SOUND: [[u32; 3]; 2] = [[3, 4, 36], [3, 5, 18]];

/// Versions from which on a report of progress is never ahead of an event, as Kubernetes has them, too.
const HONEST: [[u32; 3]; 2] = [[3, 4, 31], [3, 5, 13]];

/// True if a server's reports of progress can be believed.
pub(crate) fn reports_progress(version: &str) -> bool {
    let Some(numbers) = numbers(version) else { return false };
    let honest = HONEST.iter().find(|honest| numbers[..2] == honest[..2]);
    honest.map_or(numbers[..2] > HONEST[1][..2], |honest| numbers >= *honest)
}

/// Major, minor and patch of a version such as `3.5.21` or `3.6.0-rc.1`.
fn numbers(version: &str) -> Option<[u32; 3]> {
    let numbers: Vec<u32> = version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect();
    numbers.first_chunk().copied()
}

/// Judges a server by its version, such as `3.5.21`.
///
/// # Errors
/// `Unsupported` for one that is too old.
pub(crate) fn judge(version: &str) -> Result<()> {
    let Some([major, minor, patch]) = numbers(version) else {
        return Err(refused(format!("the server says that its version is {version:?}: this is no etcd v3")));
    };
    if [major, minor] < OLDEST {
        return Err(refused(format!("the server is etcd {version}: upgrade it, 3.4 or newer is needed")));
    }
    if SOUND.iter().any(|sound| [major, minor] == sound[..2] && [major, minor, patch] < *sound) {
        tracing::debug!(version, "this etcd can lose a deletion at the compaction mark; 3.4.36 and 3.5.18 mended that");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_believed_where_it_was_mended() {
        for version in ["3.4.31", "3.4.36", "3.5.13", "3.5.21", "3.6.0", "3.6.0-rc.1", "4.0.0"] {
            assert!(reports_progress(version), "{version}");
        }
        for version in ["3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.3.99", "", "nginx"] {
            assert!(!reports_progress(version), "{version}");
        }
    }

    #[test]
    fn old_ones_are_refused() {
        for version in ["3.4.0", "3.4.23", "3.5.18", "3.6.0-rc.1", "3.10.2", "4.0.0"] {
            assert!(judge(version).is_ok(), "{version}");
        }
        for version in ["3.3.27", "2.3.8", "3.2.0+git"] {
            assert!(judge(version).unwrap_err().to_string().contains("3.4 or newer"), "{version}");
        }
        for version in ["", "nginx", "3.4"] {
            assert!(judge(version).unwrap_err().to_string().contains("no etcd v3"), "{version}");
        }
    }
}
