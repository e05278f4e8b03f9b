// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// The shell lines of these pages are typed into one shell, in a network namespace
// and with pins of the test's own.
func TestDocs(t *testing.T) {
	nstest.NeedRoot(t)
	for _, tool := range []string{"go", "nc", "ip", "awk"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s (nc: Debian package netcat-openbsd)", tool)
		}
	}
	for _, page := range []string{"examples/echo/README.md", "docs/BINDINGS.md", "docs/TUBULAR.md"} {
		t.Run(page, func(t *testing.T) {
			root, err := filepath.Abs("../..")
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(filepath.Join(root, page))
			if err != nil {
				t.Fatal(err)
			}
			statements := shellOf(string(text))
			if len(statements) < 5 {
				t.Fatalf("only %d lines to run were found", len(statements))
			}
			nstest.Enter(t)
			// A host has an sshd: weir refuses a binding of its port.
			sshd, err := net.Listen("tcp", "0.0.0.0:22")
			if err != nil {
				t.Fatal(err)
			}
			defer sshd.Close()
			// What the page builds must not take the place of this checkout's.
			bin := filepath.Join(root, "bin")
			if err := os.MkdirAll(bin, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", bin, "tmpfs", 0, "mode=0755"); err != nil {
				t.Fatal(err)
			}
			sh := startShell(t, root)
			for _, s := range statements {
				if err := sh.run(s); err != nil {
					t.Fatalf("%s:%d: %s\n%v", page, s.line, s.text, err)
				}
			}
		})
	}
}

// statement is what a reader types, and what the page says of its output.
type statement struct {
	line   int
	text   string
	prints string // a line that is among the output, soon: after "# →"
	output string // all of the output: the block of text that follows
}

// shellOf finds the statements of a page's blocks of sh.
func shellOf(page string) (out []statement) {
	block := ""
	number := 0
	going := false // the statement goes on: its last line ends with \
	for line := range strings.Lines(page) {
		number++
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(line, "```") && block != "":
			block = ""
		case strings.HasPrefix(line, "```"):
			block = line[3:] + "." // a block that names no language is one, too
		case block == "sh." && going:
			out[len(out)-1].text += "\n" + line
			going = strings.HasSuffix(line, `\`)
		case block == "sh." && line != "":
			going = strings.HasSuffix(line, `\`)
			s := statement{line: number, text: line}
			if text, prints, ok := strings.Cut(line, "# → "); ok {
				s.text, s.prints = text, prints
			}
			out = append(out, s)
		case block == "text." && len(out) > 0:
			out[len(out)-1].output += line + "\n"
		}
	}
	return out
}

func TestShellOf(t *testing.T) {
	got := shellOf("a\n```sh\none   # → 1\n\ntwo\n```\n```text\nx\ny\n```\n```\nnot this\n```\n```ini\nnor this\n```\n```sh\nthree \\\n four\n```\n")
	want := []statement{{3, "one   ", "1", ""}, {5, "two", "", "x\ny\n"}, {18, "three \\\n four", "", ""}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// shell is a bash to which statements are typed.
type shell struct {
	*nstest.Process
	lines chan string // what it and all that it starts print
}

func startShell(t *testing.T, dir string) *shell {
	t.Helper()
	c := exec.Command("bash", "--norc", "--noprofile")
	c.Dir = dir
	c.Env = append(os.Environ(), "USER=alice", "WEIR_ROOT=")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	sh := &shell{nstest.Start(t, c), make(chan string)}
	t.Cleanup(func() { _ = unix.Kill(-sh.PID(), unix.SIGKILL) }) // with what it left in the background
	go func() {
		defer close(sh.lines)
		for {
			line, ok := sh.Line()
			if !ok {
				return
			}
			sh.lines <- line
		}
	}()
	sh.Tell("exec 2>&1")
	return sh
}

// patient has nc wait for an answer as long as it takes, where a reader's waits for a second: this machine may stand still for
// longer. -N ends what is sent, and the other end of the connection then ends its answer; -W 1 ends with the first datagram.
var patient = strings.NewReplacer("| nc -q 1 ", "| nc -N ", "| nc -u -w 1 ", "| nc -u -W 1 -w 60 ")

// run types a statement and waits until it has ended and what it is to print is
// there, which a process in the background may print later.
func (s *shell) run(x statement) error {
	const end = "the statement has ended with"
	s.Tell(patient.Replace(x.text) + "\nprintf '\\n%s %d\\n' '" + end + "' $?")
	var seen []string
	ended := false
	for late := time.After(5 * time.Minute); ; {
		if ended && (x.prints == "" || slices.Contains(seen, x.prints)) {
			break
		}
		select {
		case line, ok := <-s.lines:
			if !ok {
				return fmt.Errorf("the shell has ended; it printed\n%s", strings.Join(seen, "\n"))
			}
			if status, ok := strings.CutPrefix(line, end+" "); !ok {
				seen = append(seen, strings.TrimRight(line, " "))
				continue
			} else if status != "0" {
				return fmt.Errorf("status %s, and it printed\n%s", status, strings.Join(seen, "\n"))
			}
			ended = true
			late = time.After(60 * time.Second)
		case <-late:
			return fmt.Errorf("want %q; it printed\n%s", x.prints, strings.Join(seen, "\n"))
		}
	}
	if got := strings.TrimSpace(strings.Join(seen, "\n")); x.output != "" && got != strings.TrimSpace(x.output) {
		return fmt.Errorf("want\n%s\nit printed\n%s", x.output, got)
	}
	return nil
}
