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

// The test types the shell lines of these pages into one shell, in a network namespace and with pins of its own.
func TestDocs(t *testing.T) {
	nstest.NeedRoot(t)
	for _, tool := range []string{"go", "nc", "ip", "awk", "python3"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s (nc: Debian package netcat-openbsd)", tool)
		}
	}
	for _, page := range []string{"examples/echo/README.md", "docs/BINDINGS.md", "docs/TUBULAR.md", "docs/HANDOFF.md"} {
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
			// Real hosts run an sshd. weir rejects a binding of its port.
			sshd, err := net.Listen("tcp", "0.0.0.0:22")
			if err != nil {
				t.Fatal(err)
			}
			defer sshd.Close()
			// Builds of the page must not replace this checkout's binaries.
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

// statement is a typed command with the output promised by the page.
type statement struct {
	line   int
	text   string
	prints string // a line expected among the output, soon: after "# →"
	output string // the whole output: the following text block
}

// shellOf returns the statements in a page's sh blocks.
func shellOf(page string) (out []statement) {
	block := ""
	number := 0
	going := false // the statement continues: its last line ends with \
	for line := range strings.Lines(page) {
		number++
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(line, "```") && block != "":
			block = ""
		case strings.HasPrefix(line, "```"):
			block = line[3:] + "." // a block without a language is a text block too
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

// shell is a bash process with typed statements.
type shell struct {
	*nstest.Process
	lines chan string // output lines of the shell and its children
}

func startShell(t *testing.T, dir string) *shell {
	t.Helper()
	c := exec.Command("bash", "--norc", "--noprofile")
	c.Dir = dir
	c.Env = append(os.Environ(), "USER=alice", "WEIR_ROOT=")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	sh := &shell{nstest.Start(t, c), make(chan string)}
	t.Cleanup(func() { _ = unix.Kill(-sh.PID(), unix.SIGKILL) }) // kill its background processes too
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

// patient makes nc wait for an answer without a time limit. The page's own nc waits 1 s, too short on a stalled test
// machine. -N ends the input, and the peer then ends its answer; -W 1 ends with the first datagram.
var patient = strings.NewReplacer("| nc -q 1 ", "| nc -N ", "| nc -u -w 1 ", "| nc -u -W 1 -w 60 ")

// run types a statement and waits for its end and its promised output. A background process may print the output later.
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
