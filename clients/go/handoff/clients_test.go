// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

const clients = "../../"

func needTools(t testing.TB, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s", tool)
		}
	}
}

// compiled returns a function that compiles C once for all tests and returns the program.
func compiled(args ...string) func() ([]byte, error) {
	return sync.OnceValues(func() ([]byte, error) {
		dir, err := os.MkdirTemp("", "weir-compiled")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		out := filepath.Join(dir, "program")
		if b, err := exec.Command("gcc", append([]string{"-std=gnu99", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o", out}, args...)...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%w\n%s", err, b)
		}
		return os.ReadFile(out)
	})
}

// program writes a compiled program to a directory of the test.
func program(t testing.TB, name string, compile func() ([]byte, error)) (path string) {
	t.Helper()
	b, err := compile()
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

var compileTalk = compiled(clients + "c/talk.c")

// talker returns the path of the C server of clients/c.
func talker(t testing.TB) string {
	t.Helper()
	needTools(t, "gcc")
	return program(t, "talk", compileTalk)
}

// TestHeader compiles the header without warnings, as C and C++, with gcc and clang.
func TestHeader(t *testing.T) {
	needTools(t, "gcc", "g++")
	clang := "clang-14"
	if _, err := exec.LookPath(clang); err != nil {
		clang = "clang" // another version
		needTools(t, clang)
	}
	source := filepath.Join(t.TempDir(), "x.c")
	text := "#include \"weir_handoff.h\"\nint main(void)\n{\n\tstruct weir_handoff h;\n\treturn weir_handoff_init(&h, \"a\", \"b\", \"/nonexistent\") == 0;\n}\n"
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, compiler := range []string{"gcc -std=gnu99", "gcc -std=c99 -D_GNU_SOURCE", "gcc -std=gnu17 -O3 -fanalyzer", clang + " -std=gnu99", "g++ -std=c++11 -x c++", clang + " -std=c++17 -x c++"} {
		args := append(strings.Fields(compiler), "-O2", "-Wall", "-Wextra", "-pedantic", "-Werror", "-I", clients+"c", "-c", "-o", "/dev/null", source)
		if b, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", compiler, err, b)
		}
	}
}

// foreign starts a member in another language.
func (w *world) foreign(name, address string, command ...string) *nstest.Process {
	w.t.Helper()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		w.t.Fatal(err)
	}
	return nstest.StartReady(w.t, exec.Command(command[0], slices.Concat(command[1:], []string{w.socket, name, port}, w.proof)...))
}

// languages returns the commands of the servers in C and Python.
func languages(t testing.TB) map[string][]string {
	needTools(t, "python3")
	script, err := filepath.Abs(clients + "python/talk.py")
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]string{"c": {talker(t)}, "python": {"python3", script}}
}

// TestForeignCrashes checks that servers in C and Python survive SIGKILL and hot restarts like the
// Go one.
func TestForeignCrashes(t *testing.T) {
	rounds := 15
	if testing.Short() {
		rounds = 3
	}
	for language, command := range languages(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			w.proof = []string{map[string]string{"c": "20", "python": "0.02"}[language]}
			m := w.foreign("0", w.address, command...)
			cs := []*client{w.client(), w.client()}
			for _, c := range cs {
				c.run()
			}
			nstest.Until(t, "both are kept", func() bool { return len(w.sessions("session")) == 2 })
			for i := range rounds {
				time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
				if i%2 == 0 {
					m.Kill()
					m = w.foreign("0", w.address, command...)
					continue
				}
				next := w.foreign("0", w.address, command...)
				for line, ok := "", true; !strings.Contains(line, "moved"); line, ok = m.Line() {
					if !ok {
						t.Fatal("the replaced process has ended without handing over")
					}
				}
				if err := m.Wait(); err != nil {
					t.Errorf("the replaced process: %v", err)
				}
				m = next
			}
			for _, c := range cs {
				c.finish()
			}
			n := w.counts()
			t.Logf("%d messages, %+v", cs[0].count.Load()+cs[1].count.Load(), n)
			if n.Rescued < uint64(rounds) || n.Transfers < uint64(rounds/2) || n.Gaps+n.Closed+n.Expired > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// TestLanguages moves one stream between C, Go and Python, many times.
func TestLanguages(t *testing.T) {
	laps := 30
	if testing.Short() {
		laps = 5
	}
	w := newWorld(t, keeper.Options{})
	l := languages(t)
	type stage struct {
		p    *nstest.Process
		tell string
		says string
	}
	ring := []stage{
		{w.foreign("c", w.address, l["c"]...), "go", "moved 1, failed 0"},
		{w.memberAt(freeAddress(t), "go", 0), "move python", "move done: <nil>"},
		{w.foreign("python", freeAddress(t), l["python"]...), "c", "moved 1, failed 0"},
	}
	c := w.client()
	c.run()
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	for range laps {
		for i, s := range ring {
			at := fmt.Sprint([]string{"c", "go", "python"}[i])
			nstest.Until(t, "the session is with "+at, func() bool { x := w.sessions("session"); return len(x) == 1 && x[0].Member == at })
			time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
			nstest.Eventually(t, func() error {
				s.p.Tell(s.tell)
				line, ok := s.p.Line()
				if !ok {
					t.Fatalf("%s has ended: %v", at, s.p.Wait())
				}
				if line == s.says && len(w.sessions("session")) == 1 && w.sessions("session")[0].Member != at {
					return nil
				}
				if line != s.says && line != "moved 0, failed 0" { // it did not have the session yet
					t.Fatalf("%s prints %q", at, line)
				}
				return fmt.Errorf("%s prints %q, sessions %+v", at, line, w.sessions("session"))
			})
		}
	}
	c.finish()
	t.Logf("%d messages, %+v", c.count.Load(), w.counts())
}

// TestForeignMovesOnRequest checks that members in C and Python carry out weir handoff send, for
// one session or all. They also release sessions for a change of steering.
func TestForeignMovesOnRequest(t *testing.T) {
	for language, command := range languages(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			w.foreign("a", w.address, command...)
			w.foreign("b", freeAddress(t), command...)
			c := w.client()
			c.run()
			nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
			for i := range 10 {
				from, to, id := "a", "b", w.number()
				if i%2 == 1 {
					from, to = to, from
				}
				if i%4 < 2 {
					id = 0 // all its sessions
				}
				if err := handoff.Send(t.Context(), w.socket, "talk", from, id, to); err != nil {
					t.Fatal(err)
				}
				w.at(to)
			}
			d, id := w.direct(), w.number()
			for _, to := range []string{"b", "", "a", "nobody", "b"} {
				parked, stay, err := d.Suspend(t.Context(), patience, id)
				if err != nil || len(parked) != 1 {
					t.Fatalf("%v, stay %v, %v", parked, stay, err)
				}
				if _, err := d.Release(t.Context(), map[uint64]string{id: to}); err != nil {
					t.Fatal(err)
				}
			}
			w.at("b")
			c.finish()
			if n := w.counts(); n.Transfers != 13 || n.Gaps+n.Closed+n.Expired > 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}
