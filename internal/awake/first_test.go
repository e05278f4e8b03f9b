// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"errors"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// What a child of these tests does for as long as it is there.
const (
	little = "little"
	much   = "much"
)

// keepFirst says each 10 ms that the process is to be awake, for 3 s.
func keepFirst(what string) {
	if what == much {
		go func() {
			for began := time.Now(); ; {
				_ = time.Since(began)
			}
		}()
	}
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for range 300 {
		For(Moment)
		<-pace.C
	}
}

// A process that does little is first while it is kept awake, and at its nice value before and after. One that does much is not,
// but for a moment each second.
func TestFirst(t *testing.T) {
	nstest.NeedRoot(t)
	for what, nice := range map[string]int{little: 0, much: 0, "another's choice": 5} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, in := startAhead(t, nice, what)
			defer func() { in.Close(); _ = c.Wait() }()
			began := time.Now()
			var firsts, looks int
			for ; time.Since(began) < 2500*time.Millisecond; time.Sleep(25 * time.Millisecond) {
				if looks++; classes(t, c.Process.Pid)[unix.SCHED_RR] > 0 {
					firsts++
				}
			}
			t.Logf("first in %d of %d looks", firsts, looks)
			switch want := 0.9 * float64(looks); {
			case what == little && float64(firsts) < want:
				t.Errorf("it is first in %d of %d looks", firsts, looks)
			case what == much && (firsts == 0 || firsts > looks/2): // until it is looked at, once a second
				t.Errorf("it is first in %d of %d looks", firsts, looks)
			case what != little && what != much && firsts > 0:
				t.Errorf("it is first, and somebody wanted it to be last")
			}
			nstest.Eventually(t, func() error {
				if classes(t, c.Process.Pid)[unix.SCHED_RR] > 0 {
					return errors.New("it stays first")
				}
				return nil
			})
			if n, err := unix.Getpriority(unix.PRIO_PROCESS, c.Process.Pid); what == little && (err != nil || 20-n != ahead) {
				t.Errorf("its nice value is %d then, %v", 20-n, err)
			}
		})
	}
}

// classes counts a process's threads by their scheduling class.
func classes(t *testing.T, pid int) map[uint32]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		t.Fatal(err)
	}
	n := map[uint32]int{}
	for _, th := range threads {
		id, _ := strconv.Atoi(th.Name())
		if a, err := unix.SchedGetAttr(id, 0); err == nil {
			n[a.Policy]++
		}
	}
	return n
}
