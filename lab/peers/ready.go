// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// readiness is the state of Ready about a process.
type readiness struct {
	ticks uint64    // CPU time used, in clock ticks
	since time.Time // since this time it used none
}

// idleTime is the time without CPU use required for readiness.
const idleTime = 300 * time.Millisecond

// Ready reports whether a running collector with open sockets also accepts records. nfacctd opens its
// sockets and logs its wait for data before its BMP thread has created its tables (2 MB for each possible
// session). A flow record before this crashes it, because the core looks up the session of every sender.
// The tables take half a second, on a busy machine longer than nfacctd's limit of 5 s. nfacctd is ready
// after this log line and with no CPU use. Call Ready several times. Other collectors are ready with their
// sockets.
func (c *Collector) Ready() bool {
	l := c.now()
	if c.program != "nfacctd" {
		return true
	}
	log, err := os.ReadFile(l.log.path)
	if err != nil || !bytes.Contains(log, []byte("waiting for BMP data")) {
		return false
	}
	ticks, asleep := threads(l.proc.PID)
	if !asleep || ticks != l.ready.ticks || l.ready.since.IsZero() {
		l.ready = readiness{ticks, time.Now()}
		return false
	}
	return time.Since(l.ready.since) >= idleTime
}

// threads sums the CPU time of a process's threads in clock ticks, and reports whether all of them sleep
// (proc_pid_stat(5)).
func threads(pid int) (ticks uint64, asleep bool) {
	paths, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task/*/stat"))
	asleep = len(paths) > 0
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it ended
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]) // the first is number 3
		if len(fields) < 13 {
			continue
		}
		asleep = asleep && fields[0][0] == 'S'
		for _, f := range fields[11:13] { // utime, stime
			n, _ := strconv.ParseUint(string(f), 10, 64)
			ticks += n
		}
	}
	return ticks, asleep
}
