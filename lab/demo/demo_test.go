// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

func TestMain(m *testing.M) {
	lab.Enter()
	Play()
	nstest.Main(m)
}

// Every system has its demonstration, in a file of its name. The main one is the first.
func TestRegistry(t *testing.T) {
	names := Names()
	if names[0] != Main {
		t.Errorf("the first is %s", names[0])
	}
	for _, want := range []string{"telemetry", "steer", "bindings", "guard", "filter", "handoff", "drain", "reroute", "plan", "upgrade"} {
		if !slices.Contains(names, want) {
			t.Errorf("no demonstration %s", want)
		}
	}
	for _, d := range All() {
		if _, err := os.Stat(d.Name + ".go"); err != nil {
			t.Errorf("%s: %v", d.Name, err)
		}
		if d.Short == "" || len(d.Name)+len(d.Short) > 110 || d.Run == nil {
			t.Errorf("%+v", d)
		}
		if d.Limit() > 60*time.Second && d.Name != Main {
			t.Errorf("%s may take %s", d.Name, d.Limit())
		}
	}
	if _, err := Lookup("nothing"); err == nil || !strings.Contains(err.Error(), "steer") {
		t.Errorf("error %v does not list the names", err)
	}
}

func TestRegisterTwice(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a name was registered twice")
		}
	}()
	Register(Demo{Name: Main})
}

// watcher keeps everything shown.
type watcher struct {
	mu    sync.Mutex
	lines []string
}

func (w *watcher) Log(format string, a ...any) { w.Print(fmt.Sprintf(format, a...)) }
func (w *watcher) Show(lines []string)         { w.Print(lines...) }
func (w *watcher) Print(lines ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, lines...)
}

func (w *watcher) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.lines, "\n")
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
}

// The steps of a demonstration are shown, a failed check fails it, and nothing is left.
func TestPlay(t *testing.T) {
	needRoot(t)
	for _, holds := range []bool{true, false} {
		w := &watcher{}
		d := Demo{Name: "x", Short: "a test", Run: func(ctx context.Context, s *Stage) error {
			h, err := s.Host("one", "192.0.2.1/32")
			if err != nil {
				return err
			}
			if err := s.Say(ctx, "the host has %d address", 1); err != nil {
				return err
			}
			s.Live(func() []string { return []string{"a picture"} })
			out, err := h.Exec(ctx, "cat", "/proc/net/dev")
			if err != nil {
				return err
			}
			s.Typed("cat /proc/net/dev")
			s.Output(out, 1)
			s.Check(holds, "the host has an interface")
			s.Sum("one host")
			return nil
		}}
		r, summary, err := d.Play(t.Context(), lab.Options{Size: lab.Smoke, Watch: w}, Audience{Reads: true})
		if err != nil {
			t.Fatal(err)
		}
		if r.Failed(false) == holds || r.Metrics[lab.LeftoversMetric] != 0 {
			t.Errorf("check %v: %+v", holds, r)
		}
		mark := map[bool]string{true: "✓", false: "✗"}[holds]
		for _, want := range []string{"the host has 1 address", "a picture", "$ cat /proc/net/dev", "… (", mark + " the host has an interface"} {
			if !strings.Contains(w.text(), want) {
				t.Errorf("%q is missing in\n%s", want, w.text())
			}
		}
		if len(summary) < 2 || summary[0] != "one host" || !strings.Contains(summary[len(summary)-1], "0 objects left behind") {
			t.Errorf("%q", summary)
		}
	}
}

// An interrupted demonstration ends at once and leaves nothing.
func TestPlayInterrupted(t *testing.T) {
	needRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	d := Demo{Name: "x", Run: func(ctx context.Context, s *Stage) error {
		if _, err := s.Host("one"); err != nil {
			return err
		}
		cancel()
		return within(ctx, time.Hour, "nothing", func() error { return errors.New("never") })
	}}
	r, _, err := d.Play(ctx, lab.Options{Size: lab.Full}, Audience{})
	if !errors.Is(err, context.Canceled) || r.Metrics[lab.LeftoversMetric] != 0 {
		t.Errorf("%v: %+v", err, r)
	}
}

// A missing program is named with its remedy, and is no failure of weir.
func TestPlayWithoutProgram(t *testing.T) {
	needRoot(t)
	d := Demo{Name: "x", Needs: []string{"no-such-program"}}
	if _, _, err := d.Play(t.Context(), lab.Options{Size: lab.Smoke}, Audience{}); err == nil || !strings.Contains(err.Error(), "bootstrap --install demo") {
		t.Errorf("%v", err)
	}
}

// The summary never exceeds 20 lines, and includes failed checks.
func TestSummary(t *testing.T) {
	s := &Stage{Env: &lab.Env{}, Result: lab.NewResult("x", lab.Smoke, 1)}
	s.Watch = &watcher{}
	for i := range 40 {
		s.Sum("line %d", i)
	}
	if n := len(s.summary(s.Result)); n != 20 {
		t.Errorf("%d lines", n)
	}
}

// Names of a run become names of a machine, and columns stay aligned.
func TestRename(t *testing.T) {
	got := rename([]string{
		"in words of /tmp/weir-lab-1 and more", // a sentence, at blanks of the heading
		"SLOT  MEMBER                          PID",
		"0     pidfile /tmp/weir-lab-1/a.pid   12",
		"1     pidfile /tmp/weir-lab-1/bc.pid  13",
		"      (none of the above is a table)",
	}, "/tmp/weir-lab-1", "/run")
	want := []string{
		"in words of /run and more",
		"SLOT  MEMBER               PID",
		"0     pidfile /run/a.pid   12",
		"1     pidfile /run/bc.pid  13",
		"      (none of the above is a table)",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// A table without the name keeps its columns, also below a sentence with it.
func TestRenameElsewhere(t *testing.T) {
	got := rename([]string{"in words of weir-lab-1-collectors", "SLOT  MEMBER                   PID", "0     pidfile /run/a.pid      12"}, "weir-lab-1-", "")
	if want := []string{"in words of collectors", "SLOT  MEMBER                   PID", "0     pidfile /run/a.pid      12"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestQuoted(t *testing.T) {
	got := quoted([]string{"apply", "-f", os.TempDir() + "/weir-lab-7/weir.yaml", "a b"})
	if got != "apply -f weir.yaml 'a b'" {
		t.Error(got)
	}
}
