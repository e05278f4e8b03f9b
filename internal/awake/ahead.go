// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// ahead is the nice value of [Ahead].
const ahead = -10

// Ahead has the kernel run this process before others that want the same CPU: it is for those that do little, and for whom a
// session that stands still waits meanwhile. On a server that is to be emptied because it has too much to do, each of a move's
// dozen wake-ups would else queue behind that. In the moments of [For] it is before all but real-time processes, as long as it does
// little. It leaves alone what somebody has chosen (Nice= or CPUSchedulingPolicy= of a unit), and does nothing without CAP_SYS_NICE.
func Ahead() {
	now, err := unix.SchedGetAttr(0, 0)
	if err != nil || now.Policy != unix.SCHED_NORMAL || now.Nice != 0 {
		return
	}
	lead.Lock()
	defer lead.Unlock()
	lead.may = lead.may || unix.Setpriority(unix.PRIO_PROCESS, 0, ahead) == nil
	for more := true; more; { // threads that come have it from who makes them, who may not have it yet
		more = false
		threads, _ := os.ReadDir("/proc/self/task")
		for _, t := range threads {
			id, err := strconv.Atoi(t.Name())
			if err != nil {
				continue
			}
			if n, err := unix.Getpriority(unix.PRIO_PROCESS, id); err == nil && n == 20 {
				more = unix.Setpriority(unix.PRIO_PROCESS, id, ahead) == nil || more
			}
		}
	}
	// With autogroups (sched(7)) nice values are within a session, and this one says how sessions are among each other. It is
	// ours to say where the session is: a service's, not a shell's.
	if sid, err := unix.Getsid(0); err == nil && sid == os.Getpid() {
		_ = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(ahead)), 0)
	}
}
