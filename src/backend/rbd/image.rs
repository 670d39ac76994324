//! Safe handles of librbd: images, their making, and the trash.
//!
//! It knows handles and names, nothing of volumes or marks. Any call may block for ever, closing
//! an image included. Work that takes long reports to a [`Ctl`] from a thread of librbd.

#![allow(unsafe_code)]

use super::cluster::{ECANCELED, EINVAL, Fail, IoCtx, Outcome, c_text, check, text_of};
use super::ffi;
use crate::backend::Ctl;
use librbd_sys as rbd;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How an image is made.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// Feature bits; `None` leaves them to the cluster's configuration.
    pub features: Option<u64>,
    /// The power of two of the objects' size.
    pub order: Option<u64>,
    /// A pool of its own for the data.
    pub data_pool: Option<String>,
}

/// The same for librbd.
struct Options(ffi::rbd_image_options_t);

impl Options {
    fn new(layout: &Layout) -> Outcome<Options> {
        const OP: &str = "rbd_image_options_set";
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is written by the call.
        unsafe { ffi::rbd_image_options_create(&mut raw) };
        let options = Options(raw);
        let numbers = [
            (ffi::RBD_IMAGE_OPTION_FEATURES, layout.features),
            (ffi::RBD_IMAGE_OPTION_ORDER, layout.order),
        ];
        for (key, value) in numbers {
            if let Some(value) = value {
                check(
                    // SAFETY: the handle is alive.
                    unsafe { ffi::rbd_image_options_set_uint64(raw, key, value) },
                    OP,
                )?;
            }
        }
        if let Some(pool) = &layout.data_pool {
            let pool = c_text(pool, OP)?;
            let key = ffi::RBD_IMAGE_OPTION_DATA_POOL;
            check(
                // SAFETY: the handle is alive, the text terminated and copied by the call.
                unsafe { ffi::rbd_image_options_set_string(raw, key, pool.as_ptr()) },
                OP,
            )?;
        }
        Ok(options)
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: the handle goes with this value.
        unsafe { ffi::rbd_image_options_destroy(self.0) }
    }
}

/// Makes an empty image.
pub fn create(io: &IoCtx, name: &str, size_bytes: u64, layout: &Layout) -> Outcome<()> {
    const OP: &str = "rbd_create4";
    let name = c_text(name, OP)?;
    let options = Options::new(layout)?;
    // SAFETY: context and options are alive, the name is terminated.
    let code = unsafe { ffi::rbd_create4(io.raw(), name.as_ptr(), size_bytes, options.0) };
    check(code, OP).map(drop)
}

/// A snapshot of an image, as a source.
#[derive(Debug)]
pub struct Origin<'a> {
    /// Where the image is.
    pub io: &'a IoCtx,
    /// The image's name.
    pub image: &'a str,
    /// The snapshot's name.
    pub snap: &'a str,
}

/// Makes a clone of format 2, which needs no protected snapshot.
pub fn clone(origin: &Origin<'_>, io: &IoCtx, name: &str, layout: &Layout) -> Outcome<()> {
    const OP: &str = "rbd_clone3";
    let (parent, snap, child) = (
        c_text(origin.image, OP)?,
        c_text(origin.snap, OP)?,
        c_text(name, OP)?,
    );
    let options = Options::new(layout)?;
    let key = ffi::RBD_IMAGE_OPTION_CLONE_FORMAT;
    // SAFETY: contexts and options are alive, the names are terminated.
    let code = unsafe {
        check(ffi::rbd_image_options_set_uint64(options.0, key, 2), OP)?;
        ffi::rbd_clone3(
            origin.io.raw(),
            parent.as_ptr(),
            snap.as_ptr(),
            io.raw(),
            child.as_ptr(),
            options.0,
        )
    };
    check(code, OP).map(drop)
}

/// Removes an image by name, also what is left of one that was half made. Not for whole images:
/// ended early, the rest could be reached by this name alone, so it can't be ended early.
pub fn remove(io: &IoCtx, name: &str) -> Outcome<()> {
    let name = c_text(name, "rbd_remove")?;
    check(
        // SAFETY: the context is alive, the name terminated.
        unsafe { rbd::rbd_remove(io.raw(), name.as_ptr()) },
        "rbd_remove",
    )
    .map(drop)
}

/// Prepares a pool for images; once, and alone.
pub fn pool_init(io: &IoCtx) -> Outcome<()> {
    check(
        // SAFETY: the context is alive.
        unsafe { ffi::rbd_pool_init(io.raw(), false) },
        "rbd_pool_init",
    )
    .map(drop)
}

/// Hands what librbd reports to a `Ctl`, and its wish for an early end back.
struct Meter<'a> {
    ctl: &'a dyn Ctl,
    called: AtomicBool,
    broken: AtomicBool,
}

/// What came of a call that reports.
#[derive(Debug, Clone, Copy)]
pub struct Reported {
    /// The call's own outcome.
    pub outcome: Outcome<()>,
    /// Whether it had begun with its work: it has reported at least once.
    pub begun: bool,
}

extern "C" fn on_progress(done: u64, total: u64, arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the `Meter` of `reporting`, which lives until the call that reports has
    // returned, and librbd reports only during that call. `Meter` is shared, never changed but
    // through atomics, and `Ctl` may be called from any thread.
    let meter = unsafe { &*arg.cast::<Meter<'_>>() };
    meter.called.store(true, Ordering::Relaxed);
    // A panic must not unwind into librbd; it ends the call instead.
    let go_on = catch_unwind(AssertUnwindSafe(|| {
        meter.ctl.progress(done, total).is_continue() && !meter.ctl.cancelled()
    }));
    if go_on.unwrap_or(false) {
        return 0;
    }
    meter.broken.store(true, Ordering::Relaxed);
    -ECANCELED
}

fn reporting(
    ctl: &dyn Ctl,
    op: &'static str,
    call: impl FnOnce(ffi::librbd_progress_fn_t, *mut c_void) -> c_int,
) -> Reported {
    let meter = Meter {
        ctl,
        called: AtomicBool::new(false),
        broken: AtomicBool::new(false),
    };
    let code = call(on_progress, ptr::from_ref(&meter).cast_mut().cast());
    // Some operations turn the callback's number into one of their own.
    let code = if code < 0 && meter.broken.load(Ordering::Relaxed) {
        -ECANCELED
    } else {
        code
    };
    Reported {
        outcome: check(code, op).map(drop),
        begun: meter.called.load(Ordering::Relaxed),
    }
}

/// An image in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trashed {
    /// Its id.
    pub id: String,
    /// The name that it had.
    pub name: String,
    /// Until when it may not be removed, in seconds since the epoch.
    pub deferred_until_s: u64,
}

/// # Safety
/// The texts of `info` must be null or terminated.
unsafe fn trashed_of(info: &ffi::rbd_trash_image_info_t) -> Trashed {
    // SAFETY: as the caller promises.
    let (id, name) = unsafe { (text_of(info.id), text_of(info.name)) };
    Trashed {
        id,
        name,
        deferred_until_s: u64::try_from(info.deferment_end_time).unwrap_or(0),
    }
}

const NO_TRASH: ffi::rbd_trash_image_info_t = ffi::rbd_trash_image_info_t {
    id: ptr::null_mut(),
    name: ptr::null_mut(),
    source: 0,
    deletion_time: 0,
    deferment_end_time: 0,
};

/// Moves an image to the trash, whatever snapshots, children and users it has.
pub fn trash_move(io: &IoCtx, name: &str) -> Outcome<()> {
    let name = c_text(name, "rbd_trash_move")?;
    check(
        // SAFETY: the context is alive, the name terminated.
        unsafe { ffi::rbd_trash_move(io.raw(), name.as_ptr(), 0) },
        "rbd_trash_move",
    )
    .map(drop)
}

/// An image of the trash, by id.
pub fn trash_get(io: &IoCtx, id: &str) -> Outcome<Option<Trashed>> {
    const OP: &str = "rbd_trash_get";
    let id = c_text(id, OP)?;
    let mut info = NO_TRASH;
    // SAFETY: the context is alive, the id terminated; what the call writes is copied, then freed
    // by its own cleanup.
    unsafe {
        match check(ffi::rbd_trash_get(io.raw(), id.as_ptr(), &mut info), OP) {
            Ok(_) => {
                let entry = trashed_of(&info);
                ffi::rbd_trash_get_cleanup(&mut info);
                Ok(Some(entry))
            }
            Err(fail) if fail.is_gone() => Ok(None),
            Err(fail) => Err(fail),
        }
    }
}

const ERANGE: i32 = 34;

/// Calls a function that fills an array and says when it is too short.
fn filled<T: Copy>(
    empty: T,
    op: &'static str,
    mut call: impl FnMut(*mut T, &mut usize) -> c_int,
) -> Outcome<(Vec<T>, usize)> {
    let mut count = 64;
    loop {
        let mut entries = vec![empty; count];
        let room = count;
        match check(call(entries.as_mut_ptr(), &mut count), op) {
            Ok(_) => return Ok((entries, count.min(room))),
            // It may have grown meanwhile, so there is some more room.
            Err(fail) if fail.errno == ERANGE => count = count.max(room) + 64,
            Err(fail) => return Err(fail),
        }
    }
}

/// All images of the trash.
pub fn trash_list(io: &IoCtx) -> Outcome<Vec<Trashed>> {
    // SAFETY: the context is alive, the array as long as said; what it was filled with is copied,
    // then freed by its own cleanup.
    let (mut entries, count) = filled(NO_TRASH, "rbd_trash_list", |at, count| unsafe {
        ffi::rbd_trash_list(io.raw(), at, count)
    })?;
    // SAFETY: as above.
    unsafe {
        let list = entries[..count].iter().map(|e| trashed_of(e)).collect();
        ffi::rbd_trash_list_cleanup(entries.as_mut_ptr(), count);
        Ok(list)
    }
}

/// Removes an image from the trash for good. Ended early, it stays there and can be removed later.
pub fn trash_remove(io: &IoCtx, id: &str, ctl: &dyn Ctl) -> Reported {
    const OP: &str = "rbd_trash_remove";
    let id = match c_text(id, OP) {
        Ok(id) => id,
        Err(fail) => {
            return Reported {
                outcome: Err(fail),
                begun: false,
            };
        }
    };
    // SAFETY: the context is alive, the id terminated, and callback and argument belong together.
    reporting(ctl, OP, |callback, arg| unsafe {
        ffi::rbd_trash_remove_with_progress(io.raw(), id.as_ptr(), false, callback, arg)
    })
}

/// Takes an image out of the trash under that name.
pub fn trash_restore(io: &IoCtx, id: &str, name: &str) -> Outcome<()> {
    const OP: &str = "rbd_trash_restore";
    let (id, name) = (c_text(id, OP)?, c_text(name, OP)?);
    check(
        // SAFETY: the context is alive, both texts are terminated.
        unsafe { ffi::rbd_trash_restore(io.raw(), id.as_ptr(), name.as_ptr()) },
        OP,
    )
    .map(drop)
}

/// All images of a pool and namespace: id and name.
pub fn list(io: &IoCtx) -> Outcome<Vec<(String, String)>> {
    let empty = ffi::rbd_image_spec_t {
        id: ptr::null_mut(),
        name: ptr::null_mut(),
    };
    // SAFETY: the context is alive, the array as long as said; what it was filled with is copied,
    // then freed by its own cleanup.
    let (mut entries, count) = filled(empty, "rbd_list2", |at, count| unsafe {
        ffi::rbd_list2(io.raw(), at, count)
    })?;
    // SAFETY: as above.
    unsafe {
        let list = entries[..count]
            .iter()
            .map(|e| (text_of(e.id), text_of(e.name)))
            .collect();
        ffi::rbd_image_spec_list_cleanup(entries.as_mut_ptr(), count);
        Ok(list)
    }
}

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// With a watch on its header; the exclusive lock is taken when it is needed.
    Write,
    /// Without leaving a trace.
    Look,
}

/// An open image.
pub struct Image {
    handle: rbd::rbd_image_t,
    // The context must go after the image.
    _io: Arc<IoCtx>,
}

// SAFETY: librbd documents image handles as usable from any thread.
unsafe impl Send for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Image")
    }
}

impl Image {
    /// Opens an image by its id, also one in the trash.
    pub fn open(io: &Arc<IoCtx>, id: &str, mode: Mode) -> Outcome<Image> {
        let text = c_text(id, "rbd_open_by_id")?;
        let mut handle = ptr::null_mut();
        let (name, code) = match mode {
            // SAFETY: the context is alive, the id terminated, the handle written before use.
            Mode::Write => ("rbd_open_by_id", unsafe {
                ffi::rbd_open_by_id(io.raw(), text.as_ptr(), &mut handle, ptr::null())
            }),
            // SAFETY: as above.
            Mode::Look => ("rbd_open_by_id_read_only", unsafe {
                ffi::rbd_open_by_id_read_only(io.raw(), text.as_ptr(), &mut handle, ptr::null())
            }),
        };
        check(code, name)?;
        Ok(Image {
            handle,
            _io: Arc::clone(io),
        })
    }

    /// Makes it larger; never smaller.
    pub fn grow(&self, size_bytes: u64, ctl: &dyn Ctl) -> Outcome<()> {
        // SAFETY: the image is open, callback and argument belong together.
        reporting(ctl, "rbd_resize2", |callback, arg| unsafe {
            ffi::rbd_resize2(self.handle, size_bytes, false, callback, arg)
        })
        .outcome
    }

    /// Takes a snapshot.
    pub fn snap_create(&self, name: &str) -> Outcome<()> {
        let name = c_text(name, "rbd_snap_create")?;
        check(
            // SAFETY: the image is open, the name terminated.
            unsafe { rbd::rbd_snap_create(self.handle, name.as_ptr()) },
            "rbd_snap_create",
        )
        .map(drop)
    }

    /// Removes a snapshot; its children keep working.
    pub fn snap_remove(&self, name: &str) -> Outcome<()> {
        let name = c_text(name, "rbd_snap_remove")?;
        check(
            // SAFETY: the image is open, the name terminated.
            unsafe { rbd::rbd_snap_remove(self.handle, name.as_ptr()) },
            "rbd_snap_remove",
        )
        .map(drop)
    }

    /// Copies its parent's data into it. EINVAL if it has no parent.
    pub fn flatten(&self, ctl: &dyn Ctl) -> Outcome<()> {
        // SAFETY: the image is open, callback and argument belong together.
        reporting(ctl, "rbd_flatten", |callback, arg| unsafe {
            ffi::rbd_flatten_with_progress(self.handle, callback, arg)
        })
        .outcome
    }

    /// Writes a LUKS2 header with that passphrase. Takes seconds and half a gigabyte of memory.
    pub fn format_luks2(&self, passphrase: &[u8]) -> Outcome<()> {
        let mut options = ffi::rbd_encryption_luks2_format_options_t {
            alg: ffi::RBD_ENCRYPTION_ALGORITHM_AES256,
            passphrase: passphrase.as_ptr().cast(),
            passphrase_size: passphrase.len(),
        };
        check(
            // SAFETY: the image is open; options and passphrase outlive the call, which copies them.
            unsafe {
                ffi::rbd_encryption_format(
                    self.handle,
                    ffi::RBD_ENCRYPTION_FORMAT_LUKS2,
                    &mut options,
                    size_of_val(&options),
                )
            },
            "rbd_encryption_format",
        )
        .map(drop)
    }

    /// The addresses of those who have it open. With `Mode::Look` we are not among them.
    pub fn watchers(&self) -> Outcome<Vec<String>> {
        let empty = ffi::rbd_image_watcher_t {
            addr: ptr::null_mut(),
            id: 0,
            cookie: 0,
        };
        // SAFETY: the image is open, the array as long as said; what it was filled with is copied,
        // then freed by its own cleanup.
        let (mut entries, count) = filled(empty, "rbd_watchers_list", |at, count| unsafe {
            ffi::rbd_watchers_list(self.handle, at, count)
        })?;
        // SAFETY: as above.
        unsafe {
            let list = entries[..count].iter().map(|e| text_of(e.addr)).collect();
            ffi::rbd_watchers_list_cleanup(entries.as_mut_ptr(), count);
            Ok(list)
        }
    }

    /// Frees a range of at most 2 GiB.
    pub fn discard(&self, offset: u64, length: u64) -> Outcome<()> {
        check(
            // SAFETY: the image is open.
            unsafe { rbd::rbd_discard(self.handle, offset, length) },
            "rbd_discard",
        )
        .map(drop)
    }

    /// A writer with that many writes under way at once.
    pub fn writer(&self, depth: usize) -> Writer<'_> {
        Writer {
            image: self,
            depth: depth.max(1),
            under_way: VecDeque::new(),
        }
    }

    fn flush(&self) -> Outcome<()> {
        // SAFETY: the image is open.
        check(unsafe { rbd::rbd_flush(self.handle) }, "rbd_flush").map(drop)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: the handle goes with this value. What closing answers changes nothing: whatever
        // had to be durable was flushed before.
        unsafe { rbd::rbd_close(self.handle) };
    }
}

/// Writes several pieces of an image at once.
pub struct Writer<'a> {
    image: &'a Image,
    depth: usize,
    // Each write with its bytes, which must stay where they are until it is done.
    under_way: VecDeque<(rbd::rbd_completion_t, Box<[u8]>)>,
}

impl fmt::Debug for Writer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Writer({} under way)", self.under_way.len())
    }
}

impl Writer<'_> {
    /// Writes a piece; waits while as many are under way as there may be.
    pub fn write(&mut self, offset: u64, bytes: Box<[u8]>) -> Outcome<()> {
        const OP: &str = "rbd_aio_write";
        while self.under_way.len() >= self.depth {
            self.wait_for_oldest()?;
        }
        let mut completion = ptr::null_mut();
        check(
            // SAFETY: no callback is given, so no argument is needed.
            unsafe { rbd::rbd_aio_create_completion(ptr::null_mut(), None, &mut completion) },
            OP,
        )?;
        // SAFETY: the image is open. The bytes are kept in `under_way` until the write is done;
        // moving the box doesn't move them.
        let code = unsafe {
            rbd::rbd_aio_write(
                self.image.handle,
                offset,
                bytes.len(),
                bytes.as_ptr().cast(),
                completion,
            )
        };
        if let Err(fail) = check(code, OP) {
            // SAFETY: the write was not begun, so nobody else holds the completion.
            unsafe { rbd::rbd_aio_release(completion) };
            return Err(fail);
        }
        self.under_way.push_back((completion, bytes));
        Ok(())
    }

    /// Waits for all pieces and makes them durable.
    pub fn finish(mut self) -> Outcome<()> {
        while !self.under_way.is_empty() {
            self.wait_for_oldest()?;
        }
        self.image.flush()
    }

    fn wait_for_oldest(&mut self) -> Outcome<()> {
        let Some((completion, bytes)) = self.under_way.pop_front() else {
            return Ok(());
        };
        // SAFETY: the completion is that of a write that was begun; it is released once, after
        // the wait, and the bytes live until then.
        let code = unsafe {
            rbd::rbd_aio_wait_for_complete(completion);
            let code = rbd::rbd_aio_get_return_value(completion);
            rbd::rbd_aio_release(completion);
            code
        };
        drop(bytes);
        if code < 0 {
            return Err(Fail {
                op: "rbd_aio_write",
                errno: i32::try_from(-code).unwrap_or(EINVAL),
            });
        }
        Ok(())
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        // The bytes must not go before their writes have ended, whatever these bring.
        while !self.under_way.is_empty() {
            let _ = self.wait_for_oldest();
        }
    }
}
