//! Ceph's binary encoding, as far as the `rbd` object class needs it.
//!
//! Owns bytes only; it knows nothing of handles or connections. Numbers are little endian, a
//! string is its length (u32) and its bytes, a map its count (u32) and its entries, and a
//! versioned struct begins with version (u8), compat (u8) and the length of the rest (u32), so
//! that fields which a newer Ceph appends are skipped. What the methods take and return is public
//! in Ceph's `src/cls/rbd/cls_rbd.cc` and `cls_rbd_types.cc`.

use std::collections::BTreeMap;

/// Input for a method.
#[derive(Debug, Clone, Default)]
pub struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    /// Nothing yet.
    pub fn new() -> Encoder {
        Encoder::default()
    }

    /// Appends a number.
    pub fn u64(mut self, value: u64) -> Encoder {
        self.bytes.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends a count or a length. Nothing of ours comes near its limit.
    fn u32(&mut self, value: usize) {
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a string.
    pub fn text(mut self, text: &str) -> Encoder {
        self.u32(text.len());
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }

    /// Appends a map of strings.
    pub fn map(mut self, map: &BTreeMap<String, String>) -> Encoder {
        self.u32(map.len());
        for (key, value) in map {
            self = self.text(key).text(value);
        }
        self
    }

    /// The bytes.
    pub fn done(self) -> Vec<u8> {
        self.bytes
    }
}

/// The answer of a method. Every reader returns `None` when the bytes end too early.
#[derive(Debug, Clone)]
pub struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// Reads from the beginning.
    pub fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder { rest: bytes }
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Eight bytes with a sign.
    pub fn i64(&mut self) -> Option<i64> {
        self.array().map(i64::from_le_bytes)
    }

    /// A string. Values that are no UTF-8 (somebody else's) are shown with replacement characters.
    pub fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.u32()?).ok()?;
        Some(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    /// A versioned struct: a reader of what is in it. What follows it comes next here.
    pub fn versioned(&mut self) -> Option<Decoder<'a>> {
        let (_version, _compat) = (self.u8()?, self.u8()?);
        let length = usize::try_from(self.u32()?).ok()?;
        self.take(length).map(Decoder::new)
    }

    /// A list, each entry read by `entry`.
    pub fn list<T>(
        &mut self,
        mut entry: impl FnMut(&mut Decoder<'a>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let count = self.u32()?;
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(entry(self)?);
        }
        Some(list)
    }

    /// A map of strings.
    pub fn map(&mut self) -> Option<BTreeMap<String, String>> {
        let pairs = self.list(|d| Some((d.text()?, d.text()?)))?;
        Some(pairs.into_iter().collect())
    }
}

/// An image that another one depends on, or the other way round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linked {
    /// Its pool.
    pub pool_id: i64,
    /// Its namespace there.
    pub namespace: String,
    /// Its id.
    pub image_id: String,
}

/// A snapshot, from `snapshot_get`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snap {
    /// Its number in the pool.
    pub id: u64,
    /// Its name; one in the trash has a made-up one.
    pub name: String,
    /// The size of the image when it was taken, in bytes.
    pub size_bytes: u64,
    /// Removed, and only kept for its children.
    pub trashed: bool,
    /// Made by a user, not by a group or by mirroring.
    pub user: bool,
}

/// The answer of `snapshot_get`.
pub fn snapshot(answer: &[u8]) -> Option<Snap> {
    let mut info = Decoder::new(answer).versioned()?;
    let id = info.u64()?;
    let namespace = info.versioned()?.u32()?;
    let (name, size_bytes) = (info.text()?, info.u64()?);
    Some(Snap {
        id,
        name,
        size_bytes,
        trashed: namespace == 2,
        user: namespace == 0,
    })
}

/// The answer of `get_size`: order and size in bytes.
pub fn size(answer: &[u8]) -> Option<(u8, u64)> {
    let mut d = Decoder::new(answer);
    Some((d.u8()?, d.u64()?))
}

/// The answer of `get_snapcontext`: the numbers of the snapshots, trashed ones included, the
/// newest first.
pub fn snap_ids(answer: &[u8]) -> Option<Vec<u64>> {
    let mut d = Decoder::new(answer);
    let _newest = d.u64()?;
    d.list(Decoder::u64)
}

/// The answer of `parent_get`: the parent, if there is one.
pub fn parent(answer: &[u8]) -> Option<Option<Linked>> {
    let mut d = Decoder::new(answer).versioned()?;
    let linked = Linked {
        pool_id: d.i64()?,
        namespace: d.text()?,
        image_id: d.text()?,
    };
    Some((linked.pool_id >= 0).then_some(linked))
}

/// The answer of `children_list`.
pub fn children(answer: &[u8]) -> Option<Vec<Linked>> {
    Decoder::new(answer).list(|d| {
        let mut child = d.versioned()?;
        Some(Linked {
            pool_id: child.i64()?,
            image_id: child.text()?,
            namespace: child.text()?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versioned(inner: &[u8]) -> Vec<u8> {
        let mut out = vec![1, 1];
        out.extend_from_slice(&u32::try_from(inner.len()).unwrap().to_le_bytes());
        out.extend_from_slice(inner);
        out
    }

    #[test]
    fn maps_are_read_back() {
        let map: BTreeMap<String, String> =
            [("a".into(), "1".into()), ("volward.uid".into(), "ä".into())].into();
        let bytes = Encoder::new().map(&map).done();
        assert_eq!(bytes[..9], [2, 0, 0, 0, 1, 0, 0, 0, b'a']);
        assert_eq!(Decoder::new(&bytes).map(), Some(map));
    }

    #[test]
    fn a_snapshot_with_fields_of_a_newer_version() {
        let mut inner = 7u64.to_le_bytes().to_vec();
        inner.extend(versioned(&[2, 0, 0, 0, 9, 9, 9]));
        inner.extend(Encoder::new().text("s1").u64(1 << 30).done());
        inner.extend([1, 2, 3, 4, 5]);
        let snap = snapshot(&versioned(&inner)).unwrap();
        assert_eq!((snap.id, snap.name.as_str()), (7, "s1"));
        assert!(snap.trashed && !snap.user);
        assert_eq!(snap.size_bytes, 1 << 30);
    }

    #[test]
    fn no_parent_is_a_negative_pool() {
        let none = [(-1i64).to_le_bytes().to_vec(), vec![0; 16]].concat();
        assert_eq!(parent(&versioned(&none)), Some(None));
    }

    #[test]
    fn cut_answers_are_no_answers() {
        let whole = versioned(&[3i64.to_le_bytes().to_vec(), vec![0; 8]].concat());
        let list = [vec![1, 0, 0, 0], whole].concat();
        assert!(children(&list).is_some());
        for end in 0..list.len() {
            assert!(children(&list[..end]).is_none(), "{end}");
        }
        // A count beyond what is there must not be believed, nor allocated.
        assert_eq!(
            snap_ids(&[0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]),
            None
        );
    }
}
