//! Phases and the one table of allowed moves.

use serde::{Deserialize, Serialize};

/// Where an object stands. The API shows the first six; a volume in the last three is a trash
/// entry, or no more there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Accepted; nothing was tried yet.
    Pending,
    /// On its way into being, retries included.
    Creating,
    /// As wished.
    Ready,
    /// There, on its way to a newer wish.
    Updating,
    /// On its way out of sight.
    Deleting,
    /// Given up until `retry` or a new wish.
    Failed,
    /// Out of sight: in the trash, or a carrier of snapshots.
    Trashed,
    /// Its space is being freed; it can't be restored any more.
    Reclaiming,
    /// Nothing is left; the record goes with this move.
    Gone,
}

/// Every phase.
pub const ALL_PHASES: [Phase; 9] = [
    Phase::Pending,
    Phase::Creating,
    Phase::Ready,
    Phase::Updating,
    Phase::Deleting,
    Phase::Failed,
    Phase::Trashed,
    Phase::Reclaiming,
    Phase::Gone,
];

impl Phase {
    /// The word of the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Pending => "pending",
            Phase::Creating => "creating",
            Phase::Ready => "ready",
            Phase::Updating => "updating",
            Phase::Deleting => "deleting",
            Phase::Failed => "failed",
            Phase::Trashed => "trashed",
            Phase::Reclaiming => "reclaiming",
            Phase::Gone => "gone",
        }
    }

    /// The phase with that word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Phase> {
        ALL_PHASES.into_iter().find(|phase| phase.as_str() == word)
    }

    /// Whether an object may move from this phase to `to`. Staying is always allowed.
    #[must_use]
    pub fn may_move_to(self, to: Phase) -> bool {
        use Phase::{
            Creating, Deleting, Failed, Gone, Pending, Ready, Reclaiming, Trashed, Updating,
        };
        if self == to {
            return true;
        }
        match self {
            // A wish that is withdrawn before anything was tried leaves nothing behind.
            Pending => matches!(to, Creating | Deleting | Failed | Gone),
            Creating => matches!(to, Ready | Deleting | Failed),
            Ready => matches!(to, Updating | Deleting),
            Updating => matches!(to, Ready | Deleting | Failed),
            // A volume that never came to be, or a snapshot, leaves no trash entry.
            Deleting => matches!(to, Trashed | Failed | Gone),
            // A retry or a new wish goes on from where it stood.
            Failed => matches!(to, Creating | Updating | Deleting | Gone),
            // Restored (back into being), reclaimed, or found to be gone.
            Trashed => matches!(to, Creating | Reclaiming | Gone),
            // The mark goes only if nothing was removed.
            Reclaiming => matches!(to, Trashed | Gone),
            Gone => false,
        }
    }

    /// Whether the object is one of `/v1/trash`.
    #[must_use]
    pub fn is_trash(self) -> bool {
        matches!(self, Phase::Trashed | Phase::Reclaiming)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole table, written down a second time as a picture: rows from, columns to, in the
    /// order of `ALL_PHASES`.
    #[test]
    fn every_move_is_as_drawn() {
        let drawn = [
            //            P C R U D F T r G
            ("pending", "x x . . x x . . x"),
            ("creating", ". x x . x x . . ."),
            ("ready", ". . x x x . . . ."),
            ("updating", ". . x x x x . . ."),
            ("deleting", ". . . . x x x . x"),
            ("failed", ". x . x x x . . x"),
            ("trashed", ". x . . . . x x x"),
            ("reclaiming", ". . . . . . x x x"),
            ("gone", ". . . . . . . . x"),
        ];
        for (from, (word, row)) in ALL_PHASES.iter().zip(drawn) {
            assert_eq!(from.as_str(), word);
            for (to, cell) in ALL_PHASES.iter().zip(row.split(' ')) {
                assert_eq!(from.may_move_to(*to), cell == "x", "{from:?} -> {to:?}");
            }
        }
    }

    #[test]
    fn words_are_read_back() {
        for phase in ALL_PHASES {
            assert_eq!(Phase::parse(phase.as_str()), Some(phase));
        }
    }
}
