//! Matches each change in the store's log to a call with unknown outcome that may have made it; no call gets two
//! changes.

/// Finds a maximum matching of items to candidates by augmenting paths; each candidate gets at most one item.
pub(super) fn assign(candidates_of: &[Vec<usize>], candidates: usize) -> Vec<Option<usize>> {
    let mut item_of = vec![None; candidates];
    for item in 0..candidates_of.len() {
        place(item, candidates_of, &mut item_of, &mut vec![false; candidates]);
    }
    let mut taken = vec![None; candidates_of.len()];
    for (candidate, item) in item_of.into_iter().enumerate() {
        if let Some(item) = item {
            taken[item] = Some(candidate);
        }
    }
    taken
}

fn place(item: usize, candidates_of: &[Vec<usize>], item_of: &mut [Option<usize>], seen: &mut [bool]) -> bool {
    for &candidate in &candidates_of[item] {
        if std::mem::replace(&mut seen[candidate], true) {
            continue;
        }
        let free = match item_of[candidate] {
            None => true,
            Some(other) => place(other, candidates_of, item_of, seen),
        };
        if free {
            item_of[candidate] = Some(item);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching_moves_earlier_items_to_make_room() {
        assert_eq!(assign(&[vec![0, 1], vec![0]], 2), [Some(1), Some(0)]);
        assert_eq!(assign(&[vec![0, 1], vec![0, 2], vec![0]], 3), [Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn matching_leaves_item_out_when_candidates_run_short() {
        assert_eq!(assign(&[vec![0], vec![1], vec![0, 1]], 2), [Some(0), Some(1), None]);
        assert_eq!(assign(&[vec![]], 1), [None]);
    }
}
