//! A cluster for the tests, and records to try on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use volward::backend::Result;
use volward::backend::rbd::{RbdBackend, RbdClass, RbdConfig};
use volward::model::{
    Body, Known, Millis, ObjectId, Phase, Place, Record, SnapshotBody, Source, Uid, VolumeBody,
};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static COUNT: AtomicU64 = AtomicU64::new(1);

/// A cluster that is this test's alone.
pub struct Lab {
    pub dir: PathBuf,
    started: bool,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    /// The cluster, if Ceph was asked for.
    pub fn asked() -> Option<Lab> {
        if std::env::var_os("VOLWARD_CEPH").is_none_or(|v| v != "1") {
            eprintln!("not asked for: set VOLWARD_CEPH=1 to run the tests on Ceph");
            return None;
        }
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let given = std::env::var_os("VOLWARD_CEPH_CONF").map(PathBuf::from);
        let started = given.is_none();
        let dir = match given {
            Some(conf) => {
                assert!(
                    conf.exists(),
                    "VOLWARD_CEPH_CONF: {} isn't there",
                    conf.display()
                );
                conf.parent().unwrap().to_owned()
            }
            None => std::env::temp_dir().join(format!("volward-ceph-{}", std::process::id())),
        };
        let lab = Lab {
            dir,
            started,
            _alone: alone,
        };
        if started {
            lab.script(&["up"]);
        }
        Some(lab)
    }

    pub fn script(&self, arguments: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/ceph");
        let out = Command::new(script)
            .args(arguments)
            .env("DIR", &self.dir)
            .output()
            .expect("scripts/ceph can't be run");
        assert!(
            out.status.success(),
            "scripts/ceph {arguments:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
    }

    pub fn pause(&self, what: &str) {
        self.script(&["pause", what]);
    }

    pub fn resume(&self, what: &str) {
        self.script(&["resume", what]);
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command
            .args(["60", words[0], "-c"])
            .arg(self.dir.join("ceph.conf"))
            .args(&words[1..])
            .stdin(Stdio::null());
        command
    }

    /// Runs a command of Ceph on this cluster; what it prints.
    pub fn run(&self, words: &[&str]) -> String {
        let out = self.command(words).output().unwrap();
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{words:?}: {errors}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Neither an image nor a trash entry is left in that pool.
    pub fn assert_empty(&self, pool: &str) {
        let ours = |text: String| text.lines().filter(|l| l.contains("test-")).count();
        assert_eq!(ours(self.run(&["rbd", "ls", pool])), 0, "images");
        assert_eq!(ours(self.run(&["rbd", "trash", "ls", pool])), 0, "trash");
    }

    pub fn image_name(&self, record: &Record) -> String {
        format!("test-{}-{}", record.born, record.image.lower())
    }

    /// Somebody else who has an image open.
    pub fn watcher(&self, image: &str) -> Watcher {
        let code = "import rados, rbd, sys\n\
            cluster = rados.Rados(conffile=sys.argv[1]); cluster.connect()\n\
            image = rbd.Image(cluster.open_ioctx('rbd'), sys.argv[2])\n\
            print('open', flush=True); sys.stdin.read(); image.close(); cluster.shutdown()\n";
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", code])
            .arg(self.dir.join("ceph.conf"))
            .arg(image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        assert_eq!(line, "open\n");
        Watcher(child)
    }

    pub fn backend(&self) -> RbdBackend {
        self.backend_of("test-instance", Arc::new(Ledger0::default()), "volward")
    }

    /// Creates as librbd alone does them, one after the other, for comparison.
    pub fn raw_creates(&self, count: usize) -> String {
        let code = "import rados, rbd, sys, time\n\
            cluster = rados.Rados(conffile=sys.argv[1]); cluster.connect()\n\
            io = cluster.open_ioctx('rbd'); r = rbd.RBD(); count = int(sys.argv[2])\n\
            begun = time.time()\n\
            for n in range(count): r.create(io, f'raw-{n}', 1 << 30, features=61)\n\
            print(f'librbd alone: {count} creates in {time.time() - begun:.3f}s')\n";
        let out = Command::new("/usr/bin/python3")
            .args(["-c", code])
            .arg(self.dir.join("ceph.conf"))
            .arg(count.to_string())
            .output()
            .unwrap();
        assert!(out.status.success());
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    }

    /// The backend of a cluster that another process has started.
    pub fn backend_in(dir: &Path) -> RbdBackend {
        Lab::backend_at(
            dir,
            "test-instance",
            Arc::new(Ledger0::default()),
            "volward",
        )
    }

    pub fn backend_of(&self, instance: &str, ledger: Arc<Ledger0>, user: &str) -> RbdBackend {
        Lab::backend_at(&self.dir, instance, ledger, user)
    }

    pub fn backend_at(dir: &Path, instance: &str, ledger: Arc<Ledger0>, user: &str) -> RbdBackend {
        let class = |pool: &str, domain: &str| RbdClass {
            domain: domain.into(),
            pool: pool.into(),
            ..RbdClass::default()
        };
        RbdBackend::new(RbdConfig {
            conf: dir.join("ceph.conf"),
            user: user.into(),
            keyring: Some(dir.join(format!("{user}.keyring"))),
            options: BTreeMap::new(),
            mon_timeout_s: 5,
            prefix: "test".into(),
            classes: [
                ("fast".into(), class("rbd", "fast")),
                ("slow".into(), class("slow", "slow")),
            ]
            .into(),
            import_dirs: vec![dir.join("import")],
            keys: [("test".into(), dir.join("key"))].into(),
            instance: instance.into(),
            ledger,
            sessions_max: 16,
        })
        .unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.started {
            // Also after a failure; it must not become a second one.
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/ceph");
            let _ = Command::new(script)
                .arg("down")
                .env("DIR", &self.dir)
                .status();
        }
    }
}

/// Ends when its input does.
pub struct Watcher(Child);

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A ledger in memory.
#[derive(Debug, Default)]
pub struct Ledger0 {
    open: Mutex<Vec<String>>,
    before: Mutex<Vec<String>>,
}

impl Ledger0 {
    /// As a successor of a process with those addresses finds it.
    pub fn after(addresses: &[String]) -> Ledger0 {
        Ledger0 {
            open: Mutex::default(),
            before: Mutex::new(addresses.to_vec()),
        }
    }

    pub fn open(&self) -> Vec<String> {
        self.open.lock().unwrap().clone()
    }

    pub fn left(&self) -> Vec<String> {
        self.before.lock().unwrap().clone()
    }
}

impl volward::backend::Ledger for Ledger0 {
    fn opened(&self, _domain: &str, address: &str) -> Result<()> {
        self.open.lock().unwrap().push(address.to_owned());
        Ok(())
    }

    fn predecessors(&self, _domain: &str) -> Result<Vec<String>> {
        Ok(self.left())
    }

    fn closed(&self, _domain: &str, address: &str) -> Result<()> {
        self.open.lock().unwrap().retain(|known| known != address);
        self.before.lock().unwrap().retain(|known| known != address);
        Ok(())
    }
}

fn uid() -> Uid {
    let count = u128::from(COUNT.fetch_add(1, Ordering::Relaxed));
    Uid::new(
        1_700_000_000_000,
        u128::from(std::process::id()) << 32 | count,
    )
}

/// A volume of 1 GiB whose name was seen free.
pub fn record(name: &str, pool: &str) -> Record {
    let domain = if pool == "slow" { "slow" } else { "fast" };
    let place = Place {
        class: domain.into(),
        domain: domain.into(),
        root: pool.into(),
        data_pool: None,
        namespace: None,
        identity: None,
    };
    let body = Body::Volume(Box::new(VolumeBody::of_size(1 << 30, "{}".into())));
    let id = ObjectId::Volume(uid());
    let mut record = Record::accepted(id, name.parse().unwrap(), place, body, Millis(1));
    record.phase = Phase::Creating;
    record.known = Known::Free;
    record
}

pub fn snapshot_of(volume: &Record, name: &str) -> Record {
    let mut snap = volume.clone();
    snap.id = ObjectId::Snapshot(uid());
    snap.name = name.parse().unwrap();
    snap.known = Known::Free;
    snap.body = Body::Snapshot(SnapshotBody {
        volume: volume.name.clone(),
        size_bytes: None,
        depth: 0,
    });
    snap
}

pub fn clone_of(base: &Record, snap: &Record, name: &str) -> Record {
    let mut clone = record(name, &base.place.root);
    clone.volume_mut().unwrap().source = Some(Source::Snapshot {
        name: snap.name.clone(),
        uid: snap.id.uid(),
        image: base.image,
        image_born: base.born.clone(),
        place: base.place.clone(),
    });
    clone
}

pub fn volume_clone_of(base: &Record, name: &str) -> Record {
    let mut clone = record(name, &base.place.root);
    clone.volume_mut().unwrap().source = Some(Source::Volume {
        name: base.name.clone(),
        uid: base.image,
        born: base.born.clone(),
        place: base.place.clone(),
    });
    clone
}
