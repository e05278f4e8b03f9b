// SPDX-License-Identifier: Apache-2.0

// Package templates tests template replay with real collectors: weir serve prevents their blindness after a
// restart. Exporters send their templates once only.
package templates

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func TestMain(m *testing.M) {
	lab.Enter()
	nstest.Main(m)
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newEnv builds weir and prepares a run with it.
func newEnv(t *testing.T) *lab.Env {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	for program, pkg := range map[string]string{"nfacctd": "pmacct", "nfcapd": "nfdump", "nfdump": "nfdump"} {
		if _, err := lab.Find(program); err != nil {
			t.Skip("need: tool", program, "(Debian package", pkg+")")
		}
	}
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "-C", "../..", "build", "-o", weir, "./cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("build weir: %v\n%s", err, out)
	}
	t.Setenv("WEIR", weir)
	e, err := lab.NewEnv(lab.Smoke, 42)
	check(t, err)
	t.Cleanup(func() {
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return e
}

// A restarted collector decodes records within a second of its admission, although no exporter repeats its
// templates. It detects no gap in the sequence.
func TestRestartedCollectorsDecode(t *testing.T) {
	e := newEnv(t)
	world, err := rig.NewWorld(e, 0)
	check(t, err)
	check(t, world.Reachable(t.Context(), 60*time.Second))
	collectors := []*collector{
		newNfacctd(t, e, world.Collectors.Name, 9991),
		newNfcapd(t, e, world.Collectors.Name, 9995, "-4"),
		newNfcapd(t, e, world.Collectors.Name, 9996, "-6"),
	}
	w := newWeir(t, e, world.Collectors.Name, collectors)
	for _, c := range collectors {
		c.start()
	}
	w.admitted(collectors)
	dialer := routers.NewDialer(world.Routers.Handle)
	t.Cleanup(func() { dialer.Close() })
	var exporters []*exporter
	for _, c := range collectors {
		for i, from := range c.sources(2) {
			for _, version := range []uint16{9, 10} {
				exporters = append(exporters, newExporter(t, dialer, c, from, version, len(exporters)+1, i))
			}
		}
	}
	for _, x := range exporters {
		x.templates()
	}
	w.remembered(collectors, len(exporters))
	stop := keepSending(exporters)
	t.Run("exporters pause", func(t *testing.T) {
		for _, c := range collectors {
			c.end(syscall.SIGKILL)
		}
		time.Sleep(300 * time.Millisecond) // records sent meanwhile are lost, and the sequence continues
		stop()
		replays := w.replays(collectors)
		for _, c := range collectors {
			c.start()
		}
		w.admitted(collectors)
		w.replayed(collectors, replays, len(exporters))
		begun := time.Now()
		stop = keepSending(exporters)
		time.Sleep(time.Second)
		nstest.Until(w.t, "every exporter has sent", func() bool { return sentSince(exporters, begun) })
		stop()
		for _, wrong := range judge(t, collectors, exporters, begun, 0) {
			t.Error(wrong)
		}
	})
	t.Run("exporters go on", func(t *testing.T) {
		for tries := 1; ; tries++ {
			stop = keepSending(exporters)
			for _, c := range collectors { // they have ended
				c.start()
			}
			stalls := lab.WatchStalls()
			admitted := w.admitted(collectors)
			time.Sleep(2500 * time.Millisecond)
			nstest.Until(w.t, "every exporter has sent", func() bool { return sentSince(exporters, admitted.Add(time.Second)) })
			_, _, stall := stalls.Stop()
			stop()
			wrong := judge(t, collectors, exporters, admitted, time.Second)
			if len(wrong) == 0 {
				return
			}
			// A stalled machine is a second late itself, and proves nothing about weir.
			if stall < 200*time.Millisecond || tries == 5 {
				t.Fatalf("%s\nlongest stall of the machine %v", strings.Join(wrong, "\n"), stall)
			}
			t.Logf("trying again, because the machine stalled for %v: %q", stall, wrong)
		}
	})
}

// sentSince reports whether every exporter has sent records since then.
func sentSince(exporters []*exporter, then time.Time) bool {
	for _, x := range exporters {
		n := 0
		for _, at := range x.sent() {
			if !at.Before(then) {
				n++
			}
		}
		if n < 10*recordsInMessage {
			return false
		}
	}
	return true
}

// judge ends the collectors and reports faults in their decoded records. They must have decoded all records
// sent after from plus blind. With no blindness, no sequence may have gaps.
func judge(t *testing.T, collectors []*collector, exporters []*exporter, from time.Time, blind time.Duration) (wrong []string) {
	decoded := map[*collector]map[record]bool{}
	for _, c := range collectors {
		want := map[record]bool{}
		for _, x := range exporters {
			for n, at := range x.sent() {
				if x.to == c && at.Sub(from) >= blind {
					want[record{x.number, n}] = true
				}
			}
		}
		decoded[c] = c.decoded(want)
		if n := c.gaps(); n > 0 && blind == 0 {
			wrong = append(wrong, fmt.Sprintf("%s reported %d gaps in sequences:\n%s", c.name, n, c.log()))
		}
	}
	worst := time.Duration(0)
	for _, x := range exporters {
		sent, missing := 0, 0
		var first time.Duration = -1
		for n, at := range x.sent() {
			if at.Before(from) {
				continue
			}
			if decoded[x.to][record{x.number, n}] {
				if d := at.Sub(from); first < 0 || d < first {
					first = d
				}
			} else if at.Sub(from) >= blind {
				missing++
			}
			if at.Sub(from) >= blind {
				sent++
			}
		}
		if sent == 0 || missing > 0 {
			wrong = append(wrong, fmt.Sprintf("%s, version %d, from %s: %d of %d records were not decoded", x.to.name, x.version, x.from, missing, sent))
		}
		worst = max(worst, first)
	}
	t.Logf("first decoded record after admission: %v, for the slowest of %d exporters", worst, len(exporters))
	return wrong
}
