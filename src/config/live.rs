//! What a reload changes at once, and what waits for a restart.

use super::Config;

impl Config {
    /// Which sections differ: those that apply live, and those that need a restart. Both in words
    /// of the file, such as `lanes` or `api.listen`.
    #[must_use]
    pub fn live_changes(&self, new: &Config) -> (Vec<String>, Vec<String>) {
        let mut applies = Vec::new();
        let mut restart = Vec::new();
        let mut live = |differs: bool, name: &str| {
            if differs {
                applies.push(name.to_owned());
            }
        };
        live(self.log_level != new.log_level, "log.level");
        live(self.events != new.events, "events");
        live(self.lanes != new.lanes, "lanes");
        live(self.deadlines != new.deadlines, "deadlines");
        live(self.retry != new.retry, "retry");
        live(self.breaker != new.breaker, "breaker");
        live(self.trash != new.trash, "trash");
        live(self.shutdown_grace_ms != new.shutdown_grace_ms, "shutdown");
        live(self.restart_after_ms != new.restart_after_ms, "restart");
        let mut limits = new.limits;
        limits.threads = self.limits.threads;
        live(self.limits != limits, "limits");
        live(
            self.health.heartbeat_max_ms != new.health.heartbeat_max_ms,
            "health.heartbeat_max",
        );
        let mut wait = |differs: bool, name: &str| {
            if differs {
                restart.push(name.to_owned());
            }
        };
        wait(self.api != new.api, "api");
        let mut health = new.health.clone();
        health.heartbeat_max_ms = self.health.heartbeat_max_ms;
        wait(self.health != health, "health");
        wait(self.store_path != new.store_path, "store.path");
        wait(self.limits.threads != new.limits.threads, "limits.threads");
        wait(self.keys != new.keys, "keys");
        wait(self.doctor != new.doctor, "doctor");
        wait(
            self.classes != new.classes || self.default_class != new.default_class,
            "classes",
        );
        wait(self.backend != new.backend, "backend");
        wait(self.faults != new.faults, "backend.faults");
        (applies, restart)
    }

    /// This configuration with everything of `new` that can change without a restart.
    #[must_use]
    pub fn with_live(&self, new: &Config) -> Config {
        let mut config = self.clone();
        config.log_level = new.log_level;
        config.events = new.events;
        config.lanes = new.lanes;
        config.deadlines = new.deadlines;
        config.retry = new.retry;
        config.breaker = new.breaker;
        config.trash = new.trash;
        config.shutdown_grace_ms = new.shutdown_grace_ms;
        config.restart_after_ms = new.restart_after_ms;
        config.limits = new.limits;
        config.limits.threads = self.limits.threads;
        config.health.heartbeat_max_ms = new.health.heartbeat_max_ms;
        config
    }
}
