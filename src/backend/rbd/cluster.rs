//! Safe handles of librados: a connection, an I/O context, and operations on single objects.
//!
//! Each handle is owned by one value and released when that value goes. It knows nothing of
//! volumes. Any call may block for ever, dropping included, unless it says otherwise.

#![allow(unsafe_code)]

use super::ffi;
use crate::backend::Error;
use crate::model::ErrorKind;
use librados_sys as rados;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

/// A call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fail {
    /// The function, or the method of the object class.
    pub op: &'static str,
    /// The positive errno.
    pub errno: i32,
}

/// ENOENT.
pub const ENOENT: i32 = 2;
/// EPERM.
pub const EPERM: i32 = 1;
/// EACCES.
pub const EACCES: i32 = 13;
/// EBUSY.
pub const EBUSY: i32 = 16;
/// EEXIST.
pub const EEXIST: i32 = 17;
/// EINVAL.
pub const EINVAL: i32 = 22;
/// ENOTEMPTY.
pub const ENOTEMPTY: i32 = 39;
/// EBADMSG: an answer that can't be read.
pub const EBADMSG: i32 = 74;
/// ECANCELED.
pub const ECANCELED: i32 = 125;

impl Fail {
    /// Whether the thing isn't there.
    pub fn is_gone(self) -> bool {
        self.errno == ENOENT
    }

    /// The error with a sentence about the thing.
    pub fn about(self, thing: impl fmt::Display) -> Error {
        let words = match ErrorKind::of_errno(self.errno) {
            ErrorKind::Gone => "it is not there",
            ErrorKind::AlreadyExists => "something with that name is there",
            ErrorKind::InUse => "it is in use",
            ErrorKind::Blocked => "snapshots hold it",
            ErrorKind::Forbidden => {
                "the client's capabilities don't allow it; see `ceph auth get` for the client"
            }
            ErrorKind::Invalid => "the cluster refuses it as invalid",
            ErrorKind::NoSpace => "the pool is full or over its quota",
            ErrorKind::Unreachable => "the cluster doesn't answer",
            ErrorKind::SessionLost => "this client was put on the cluster's blocklist",
            ErrorKind::Cancelled => "ended early, as asked for",
            _ => "the call failed",
        };
        Error::of_errno(self.errno, self.op, format!("{thing}: {words}"))
    }
}

/// What a call brings.
pub type Outcome<T> = std::result::Result<T, Fail>;

/// The outcome of a call that returns a negative errno.
pub(super) fn check(code: c_int, op: &'static str) -> Outcome<c_int> {
    if code < 0 {
        return Err(Fail { op, errno: -code });
    }
    Ok(code)
}

/// A text for C. One with a zero byte in it names nothing.
pub(super) fn c_text(text: &str, op: &'static str) -> Outcome<CString> {
    CString::new(text).map_err(|_| Fail { op, errno: EINVAL })
}

/// A text from C; a null pointer is an empty one.
///
/// # Safety
/// `text` must be null or point to a terminated text.
pub(super) unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and terminated as the caller promises.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// How to connect.
#[derive(Debug, Clone)]
pub struct Access {
    /// The cluster's configuration file.
    pub conf: PathBuf,
    /// The client without `client.`.
    pub user: String,
    /// Options, set in this order after the file was read.
    pub options: Vec<(String, String)>,
}

/// A connection: about 15 threads and 2 MB.
pub struct Cluster {
    handle: rados::rados_t,
}

// SAFETY: librados documents a connected handle as usable from any thread at once; this type
// hands out nothing that is bound to a thread.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cluster")
    }
}

impl Cluster {
    /// Connects. Returns within `client_mount_timeout` seconds, if that option is given.
    pub fn connect(access: &Access) -> Outcome<Cluster> {
        let user = c_text(&access.user, "rados_create")?;
        let conf = c_text(&access.conf.to_string_lossy(), "rados_conf_read_file")?;
        let mut handle = ptr::null_mut();
        check(
            // SAFETY: both pointers are valid during the call, and the handle is written before use.
            unsafe { rados::rados_create(&mut handle, user.as_ptr()) },
            "rados_create",
        )?;
        // From here on the handle is shut down whatever happens.
        let cluster = Cluster { handle };
        check(
            // SAFETY: the handle is alive, the path is terminated.
            unsafe { rados::rados_conf_read_file(handle, conf.as_ptr()) },
            "rados_conf_read_file",
        )?;
        for (key, value) in &access.options {
            let (key, value) = (
                c_text(key, "rados_conf_set")?,
                c_text(value, "rados_conf_set")?,
            );
            check(
                // SAFETY: the handle is alive, both texts are terminated and copied by the call.
                unsafe { rados::rados_conf_set(handle, key.as_ptr(), value.as_ptr()) },
                "rados_conf_set",
            )?;
        }
        // SAFETY: the handle is alive and not connected yet.
        check(unsafe { rados::rados_connect(handle) }, "rados_connect")?;
        Ok(cluster)
    }

    /// The cluster's id.
    pub fn fsid(&self) -> Outcome<String> {
        let mut buffer = [0 as c_char; 64];
        check(
            // SAFETY: the handle is connected, the buffer is as long as said.
            unsafe { rados::rados_cluster_fsid(self.handle, buffer.as_mut_ptr(), buffer.len()) },
            "rados_cluster_fsid",
        )?;
        // SAFETY: the call has written a terminated text.
        Ok(unsafe { text_of(buffer.as_ptr()) })
    }

    /// Its own address, by which the cluster can put it on the blocklist. Asks nobody.
    pub fn address(&self) -> Outcome<String> {
        let mut text = ptr::null_mut();
        check(
            // SAFETY: the handle is connected; the text is written by the call.
            unsafe { ffi::rados_getaddrs(self.handle, &mut text) },
            "rados_getaddrs",
        )?;
        // SAFETY: the call has succeeded, so the text is terminated and ours to free.
        unsafe {
            let address = text_of(text);
            rados::rados_buffer_free(text);
            Ok(address)
        }
    }

    /// The number of the pool with that name, as the newest map that we know has it.
    pub fn pool_id(&self, pool: &str) -> Outcome<i64> {
        const OP: &str = "rados_pool_lookup";
        let pool = c_text(pool, OP)?;
        // SAFETY: the handle is connected, the name terminated.
        let id = unsafe { rados::rados_pool_lookup(self.handle, pool.as_ptr()) };
        if id < 0 {
            let errno = i32::try_from(-id).unwrap_or(EINVAL);
            return Err(Fail { op: OP, errno });
        }
        Ok(id)
    }

    /// Puts a client's address on the blocklist for `expire_s` seconds.
    pub fn blocklist(&self, address: &str, expire_s: u32) -> Outcome<()> {
        let address = c_text(address, "rados_blocklist_add")?;
        check(
            // SAFETY: the handle is connected. The parameter lacks `const`, but the text is copied.
            unsafe { ffi::rados_blocklist_add(self.handle, address.as_ptr().cast_mut(), expire_s) },
            "rados_blocklist_add",
        )
        .map(drop)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: every I/O context and image of this connection holds an `Arc` of it, so none is
        // left, and the handle goes with this value. A handle that never connected may be shut
        // down as well.
        unsafe { rados::rados_shutdown(self.handle) }
    }
}

/// A pool and a namespace, as one connection sees them. Full pools answer instead of hanging.
pub struct IoCtx {
    handle: rados::rados_ioctx_t,
    pool: String,
    // Declared after the handle and dropped after it: the context must go before its connection.
    _cluster: Arc<Cluster>,
}

// SAFETY: an I/O context may be used from any thread at once as long as nobody changes its
// namespace, locator or snapshot; these are set once in `open`, before it is shared.
unsafe impl Send for IoCtx {}
// SAFETY: as above.
unsafe impl Sync for IoCtx {}

impl fmt::Debug for IoCtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoCtx({})", self.pool)
    }
}

/// One call of a method of the `rbd` object class: its name and its input.
pub type Method<'a> = (&'static CStr, &'a [u8]);

const CLASS: &CStr = c"rbd";

impl IoCtx {
    /// The pool `pool` and its namespace.
    pub fn open(cluster: &Arc<Cluster>, pool: &str, namespace: Option<&str>) -> Outcome<IoCtx> {
        const OP: &str = "rados_ioctx_create";
        let name = c_text(pool, OP)?;
        let namespace = c_text(namespace.unwrap_or(""), OP)?;
        let mut handle = ptr::null_mut();
        check(
            // SAFETY: the connection is alive, the name terminated, the handle written before use.
            unsafe { rados::rados_ioctx_create(cluster.handle, name.as_ptr(), &mut handle) },
            OP,
        )?;
        // SAFETY: the handle is new and not shared yet.
        unsafe {
            rados::rados_ioctx_set_namespace(handle, namespace.as_ptr());
            ffi::rados_set_pool_full_try(handle);
        }
        Ok(IoCtx {
            handle,
            pool: pool.to_owned(),
            _cluster: Arc::clone(cluster),
        })
    }

    /// The raw handle, for librbd.
    pub(super) fn raw(&self) -> rados::rados_ioctx_t {
        self.handle
    }

    /// The number of the pool. Asks nobody.
    pub fn pool_id(&self) -> i64 {
        // SAFETY: the handle is alive.
        unsafe { rados::rados_ioctx_get_id(self.handle) }
    }

    /// Whether that object is there.
    pub fn exists(&self, object: &str) -> Outcome<bool> {
        let object = c_text(object, "rados_stat")?;
        let (mut size, mut time) = (0, 0);
        // SAFETY: the handle is alive, the name terminated, both numbers are writable.
        let code = unsafe { rados::rados_stat(self.handle, object.as_ptr(), &mut size, &mut time) };
        match check(code, "rados_stat") {
            Ok(_) => Ok(true),
            Err(fail) if fail.is_gone() => Ok(false),
            Err(fail) => Err(fail),
        }
    }

    /// The first bytes of an object, at most 4096.
    pub fn read(&self, object: &str) -> Outcome<Vec<u8>> {
        let object = c_text(object, "rados_read")?;
        let mut buffer = vec![0u8; 4096];
        // SAFETY: the handle is alive, the name terminated, the buffer as long as said.
        let read = check(
            unsafe {
                rados::rados_read(
                    self.handle,
                    object.as_ptr(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                )
            },
            "rados_read",
        )?;
        buffer.truncate(usize::try_from(read).unwrap_or(0));
        Ok(buffer)
    }

    /// Creates an empty object, if it isn't there.
    pub fn create(&self, object: &str) -> Outcome<()> {
        const OP: &str = "rados_write_op_operate";
        let object = c_text(object, OP)?;
        // SAFETY: the operation lives until it is released; no category and no time are given.
        let code = unsafe {
            let op = rados::rados_create_write_op();
            rados::rados_write_op_create(op, 0, ptr::null());
            let code =
                rados::rados_write_op_operate(op, self.handle, object.as_ptr(), ptr::null_mut(), 0);
            rados::rados_release_write_op(op);
            code
        };
        check(code, OP).map(drop)
    }

    /// Removes an object.
    pub fn remove(&self, object: &str) -> Outcome<()> {
        let object = c_text(object, "rados_remove")?;
        // SAFETY: the handle is alive, the name terminated.
        let code = unsafe { rados::rados_remove(self.handle, object.as_ptr()) };
        check(code, "rados_remove").map(drop)
    }

    /// Calls methods that only read, in one round trip, all on the same version of the object.
    /// Each has an answer of its own.
    pub fn ask(&self, object: &str, methods: &[Method<'_>]) -> Outcome<Vec<Outcome<Vec<u8>>>> {
        const OP: &str = "rados_read_op_operate";
        let object = c_text(object, OP)?;
        // What the operation writes into; neither moves nor shrinks until it has returned.
        let mut answers: Vec<(*mut c_char, usize, c_int)> =
            vec![(ptr::null_mut(), 0, 0); methods.len()];
        // SAFETY: the operation lives until it is released below. Its inputs are copied by each
        // call, its outputs point into `answers`, which outlives it. Buffers that it has allocated
        // are copied and freed once.
        unsafe {
            let op = rados::rados_create_read_op();
            rados::rados_read_op_assert_exists(op);
            for ((method, input), answer) in methods.iter().zip(&mut answers) {
                rados::rados_read_op_exec(
                    op,
                    CLASS.as_ptr(),
                    method.as_ptr(),
                    input.as_ptr().cast(),
                    input.len(),
                    &mut answer.0,
                    &mut answer.1,
                    &mut answer.2,
                );
                rados::rados_read_op_set_flags(op, ffi::LIBRADOS_OP_FLAG_FAILOK);
            }
            let code = rados::rados_read_op_operate(op, self.handle, object.as_ptr(), 0);
            rados::rados_release_read_op(op);
            let mut read = Vec::new();
            for ((method, _), (buffer, length, code)) in methods.iter().zip(answers) {
                let mut bytes = Vec::new();
                if !buffer.is_null() {
                    bytes.extend_from_slice(std::slice::from_raw_parts(buffer.cast(), length));
                    rados::rados_buffer_free(buffer);
                }
                let op = method.to_str().unwrap_or("exec");
                read.push(check(code, op).map(|_| bytes));
            }
            check(code, OP)?;
            Ok(read)
        }
    }

    /// Calls one method that only reads.
    pub fn ask_one(&self, object: &str, method: &'static CStr, input: &[u8]) -> Outcome<Vec<u8>> {
        self.ask(object, &[(method, input)])?
            .pop()
            .unwrap_or(Err(Fail {
                op: "rados_read_op_operate",
                errno: EBADMSG,
            }))
    }

    /// Calls methods that change an object that is there already, all or none of them.
    pub fn tell(&self, object: &str, methods: &[Method<'_>]) -> Outcome<()> {
        const OP: &str = "rados_write_op_operate";
        let object = c_text(object, OP)?;
        // SAFETY: the operation lives until it is released; its inputs are copied by each call,
        // and no place for outputs is given.
        let code = unsafe {
            let op = rados::rados_create_write_op();
            rados::rados_write_op_assert_exists(op);
            for (method, input) in methods {
                rados::rados_write_op_exec(
                    op,
                    CLASS.as_ptr(),
                    method.as_ptr(),
                    input.as_ptr().cast(),
                    input.len(),
                    ptr::null_mut(),
                );
            }
            let code =
                rados::rados_write_op_operate(op, self.handle, object.as_ptr(), ptr::null_mut(), 0);
            rados::rados_release_write_op(op);
            code
        };
        check(code, OP).map(drop)
    }

    /// Wakes those who watch an object, with an empty message. Waits for their answers for at
    /// most `timeout_ms`.
    pub fn notify(&self, object: &str, timeout_ms: u64) -> Outcome<()> {
        let object = c_text(object, "rados_notify2")?;
        check(
            // SAFETY: the handle is alive, the name terminated, the message empty; no reply is asked.
            unsafe {
                rados::rados_notify2(
                    self.handle,
                    object.as_ptr(),
                    ptr::null(),
                    0,
                    timeout_ms,
                    ptr::null_mut(),
                    ptr::null_mut(),
                )
            },
            "rados_notify2",
        )
        .map(drop)
    }
}

impl Drop for IoCtx {
    fn drop(&mut self) {
        // SAFETY: the handle goes with this value; images hold an `Arc` of it, so none is left.
        unsafe { rados::rados_ioctx_destroy(self.handle) }
    }
}
