//! Declarations of librbd and librados that `librbd-sys` and `librados-sys` lack.
//!
//! Names, types and constants are those of `rbd/librbd.h` and `rados/librados.h` of Ceph 16 and
//! later. Nothing is called here; the safe handles are in `cluster` and `image`.

#![allow(unsafe_code, non_camel_case_types)]

use librados_sys::{rados_ioctx_t, rados_t};
use librbd_sys::rbd_image_t;
use std::ffi::{c_char, c_int, c_void};

/// Options of an image that is to be made.
pub type rbd_image_options_t = *mut c_void;
/// Called with work done and total; a negative answer ends the operation with that number.
pub type librbd_progress_fn_t = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `enum` in librbd.h.
pub const RBD_IMAGE_OPTION_FEATURES: c_int = 1;
/// `enum` in librbd.h.
pub const RBD_IMAGE_OPTION_ORDER: c_int = 2;
/// `enum` in librbd.h.
pub const RBD_IMAGE_OPTION_DATA_POOL: c_int = 10;
/// `enum` in librbd.h.
pub const RBD_IMAGE_OPTION_CLONE_FORMAT: c_int = 12;
/// `rbd_encryption_format_t`.
pub const RBD_ENCRYPTION_FORMAT_LUKS2: c_int = 1;
/// `rbd_encryption_algorithm_t`.
pub const RBD_ENCRYPTION_ALGORITHM_AES256: c_int = 1;
/// `LIBRADOS_OP_FLAG_FAILOK` in librados.h: the operation goes on if this part of it fails.
pub const LIBRADOS_OP_FLAG_FAILOK: c_int = 2;

/// An image in the trash.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_trash_image_info_t {
    /// Its id.
    pub id: *mut c_char,
    /// The name that it had.
    pub name: *mut c_char,
    /// `rbd_trash_image_source_t`.
    pub source: c_int,
    /// Seconds since the epoch.
    pub deletion_time: i64,
    /// Seconds since the epoch.
    pub deferment_end_time: i64,
}

/// A client that has an image open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_image_watcher_t {
    /// Its address.
    pub addr: *mut c_char,
    /// Its number.
    pub id: i64,
    /// Which of its watches.
    pub cookie: u64,
}

/// An image in a list.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_image_spec_t {
    /// Its id.
    pub id: *mut c_char,
    /// Its name.
    pub name: *mut c_char,
}

/// What LUKS2 is made with.
#[repr(C)]
#[derive(Debug)]
pub struct rbd_encryption_luks2_format_options_t {
    /// `rbd_encryption_algorithm_t`.
    pub alg: c_int,
    /// Not terminated.
    pub passphrase: *const c_char,
    /// In bytes.
    pub passphrase_size: usize,
}

#[link(name = "rados")]
unsafe extern "C" {
    pub fn rados_getaddrs(cluster: rados_t, addrs: *mut *mut c_char) -> c_int;
    pub fn rados_blocklist_add(cluster: rados_t, address: *mut c_char, expire_s: u32) -> c_int;
    pub fn rados_set_pool_full_try(io: rados_ioctx_t);
}

#[link(name = "rbd")]
unsafe extern "C" {
    pub fn rbd_image_options_create(opts: *mut rbd_image_options_t);
    pub fn rbd_image_options_destroy(opts: rbd_image_options_t);
    pub fn rbd_image_options_set_uint64(opts: rbd_image_options_t, key: c_int, value: u64)
    -> c_int;
    pub fn rbd_image_options_set_string(
        opts: rbd_image_options_t,
        key: c_int,
        value: *const c_char,
    ) -> c_int;
    pub fn rbd_create4(
        io: rados_ioctx_t,
        name: *const c_char,
        size: u64,
        opts: rbd_image_options_t,
    ) -> c_int;
    pub fn rbd_clone3(
        parent_io: rados_ioctx_t,
        parent: *const c_char,
        snap: *const c_char,
        child_io: rados_ioctx_t,
        child: *const c_char,
        opts: rbd_image_options_t,
    ) -> c_int;
    pub fn rbd_open_by_id(
        io: rados_ioctx_t,
        id: *const c_char,
        image: *mut rbd_image_t,
        snap: *const c_char,
    ) -> c_int;
    pub fn rbd_open_by_id_read_only(
        io: rados_ioctx_t,
        id: *const c_char,
        image: *mut rbd_image_t,
        snap: *const c_char,
    ) -> c_int;
    pub fn rbd_resize2(
        image: rbd_image_t,
        size: u64,
        allow_shrink: bool,
        cb: librbd_progress_fn_t,
        arg: *mut c_void,
    ) -> c_int;
    pub fn rbd_flatten_with_progress(
        image: rbd_image_t,
        cb: librbd_progress_fn_t,
        arg: *mut c_void,
    ) -> c_int;
    pub fn rbd_trash_move(io: rados_ioctx_t, name: *const c_char, delay_s: u64) -> c_int;
    pub fn rbd_trash_get(
        io: rados_ioctx_t,
        id: *const c_char,
        info: *mut rbd_trash_image_info_t,
    ) -> c_int;
    pub fn rbd_trash_get_cleanup(info: *mut rbd_trash_image_info_t);
    pub fn rbd_trash_list(
        io: rados_ioctx_t,
        entries: *mut rbd_trash_image_info_t,
        count: *mut usize,
    ) -> c_int;
    pub fn rbd_trash_list_cleanup(entries: *mut rbd_trash_image_info_t, count: usize);
    pub fn rbd_trash_remove_with_progress(
        io: rados_ioctx_t,
        id: *const c_char,
        force: bool,
        cb: librbd_progress_fn_t,
        arg: *mut c_void,
    ) -> c_int;
    pub fn rbd_trash_restore(io: rados_ioctx_t, id: *const c_char, name: *const c_char) -> c_int;
    pub fn rbd_list2(io: rados_ioctx_t, images: *mut rbd_image_spec_t, count: *mut usize) -> c_int;
    pub fn rbd_image_spec_list_cleanup(images: *mut rbd_image_spec_t, count: usize);
    pub fn rbd_watchers_list(
        image: rbd_image_t,
        watchers: *mut rbd_image_watcher_t,
        count: *mut usize,
    ) -> c_int;
    pub fn rbd_watchers_list_cleanup(watchers: *mut rbd_image_watcher_t, count: usize);
    pub fn rbd_encryption_format(
        image: rbd_image_t,
        format: c_int,
        opts: *mut rbd_encryption_luks2_format_options_t,
        opts_size: usize,
    ) -> c_int;
    pub fn rbd_pool_init(io: rados_ioctx_t, force: bool) -> c_int;
}
