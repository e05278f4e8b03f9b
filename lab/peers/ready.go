// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// readiness is what Ready saw of a process.
type readiness struct {
	ticks uint64    // CPU time used, in clock ticks
	since time.Time // for so long it used none
}

// idleTime is for how long a process must have used no CPU to be ready.
const idleTime = 300 * time.Millisecond

// Ready tells whether a running collector whose sockets are there can take records, too. nfacctd opens them, and
// says that it waits, before its BMP thread has made its tables (2 MB a session that it may have); a flow record
// that comes before crashes it, for the core looks up the session of every sender. That takes half a second, on
// a busy machine longer than the 5 s that nfacctd allows for it. So nfacctd is ready when it has said that it
// waits and is at rest; call Ready several times. Other collectors are ready when their sockets are there.
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

// threads sums up the CPU time of a process's threads, in clock ticks, and tells whether all of them sleep
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
