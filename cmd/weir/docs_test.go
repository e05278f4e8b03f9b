// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	for _, tool := range []string{"go", "nc", "ip", "awk", "python3", "openssl", "nsenter", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s (nc: Debian package netcat-openbsd)", tool)
		}
	}
	pages := []string{
		"docs/APPLY.md",
		"docs/BACKENDS.md",
		"docs/BESIDE.md",
		"docs/BINDINGS.md",
		"docs/FILTER.md",
		"docs/GENERATIONS.md",
		"docs/GUARD.md",
		"docs/HANDOFF.md",
		"docs/LB.md",
		"docs/MEMBERS.md",
		"docs/STEER.md",
		"docs/coming-from/nftables.md",
		"docs/coming-from/rakelimit.md",
		"docs/coming-from/tubular.md",
		"examples/echo/README.md",
	}
	built := t.TempDir() // weir as installed, for pages that do not build it
	if out, err := exec.Command("go", "build", "-o", built, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, page := range pages {
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
			dir := root
			if strings.Contains(string(text), "\ngo build ") {
				// Builds of the page must not replace this checkout's binaries.
				bin := filepath.Join(root, "bin")
				if err := os.MkdirAll(bin, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := unix.Mount("tmpfs", bin, "tmpfs", 0, "mode=0755"); err != nil {
					t.Fatal(err)
				}
			} else if !strings.Contains(string(text), "in a checkout of the repository") {
				dir = t.TempDir()
			}
			sh := startShell(t, dir, built)
			for _, s := range statements {
				if s.file != "" {
					if dir == root {
						continue // a page that builds saves its files itself
					}
					if err := os.WriteFile(filepath.Join(dir, s.file), []byte(s.text), 0o600); err != nil {
						t.Fatal(err)
					}
					continue
				}
				if err := sh.run(s); err != nil {
					t.Fatalf("%s:%d: %s\n%v", page, s.line, s.text, err)
				}
			}
			if missing := sh.rest(); len(missing) > 0 {
				t.Errorf("%s: background processes did not print %q", page, missing)
			}
		})
	}
}

// statement is a typed command with the output promised by the page, or a file to save.
type statement struct {
	line   int
	file   string // name of the file: the text is its contents
	text   string
	prints string // a line expected among the output, soon: after "# →"
	output string // the whole output: the following text block
}

// shellOf returns the statements in a page's sh blocks, and the files in its yaml blocks with a first line "# NAME.yaml".
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
		case block == "yaml." && strings.HasPrefix(line, "# ") && strings.HasSuffix(line, ".yaml"):
			out = append(out, statement{line: number, file: line[2:]})
			block = "file."
		case block == "file.":
			out[len(out)-1].text += line + "\n"
		case block == "yaml.":
			block = "other."
		case block == "text." && len(out) > 0:
			out[len(out)-1].output += line + "\n"
		}
	}
	return out
}

func TestShellOf(t *testing.T) {
	got := shellOf("a\n```sh\none   # → 1\n\ntwo\n```\n```text\nx\ny\n```\n```\nnot this\n```\n```ini\nnor this\n```\n```sh\nthree \\\n four\n```\n```yaml\n# a.yaml\nb:\n```\n```yaml\nb:\n# c.yaml\n```\n")
	want := []statement{
		{line: 3, text: "one   ", prints: "1"}, {line: 5, text: "two", output: "x\ny\n"},
		{line: 18, text: "three \\\n four"}, {line: 22, file: "a.yaml", text: "b:\n"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// shell is a bash process with typed statements.
type shell struct {
	*nstest.Process
	lines   chan string // output lines of the shell and its children
	pending []string    // lines promised by background processes
}

func startShell(t *testing.T, dir, path string) *shell {
	t.Helper()
	c := exec.Command("bash", "--norc", "--noprofile")
	c.Dir = dir
	demo := filepath.Join(t.TempDir(), "demo") // machines of examples/handoff/namespaces
	t.Cleanup(func() {
		down := exec.Command("../../examples/handoff/namespaces", "down")
		down.Env = append(os.Environ(), "WEIR_DEMO="+demo)
		if out, err := down.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	c.Env = append(os.Environ(), "USER=alice", "WEIR_ROOT=", "WEIR_DEMO="+demo, "PATH="+path+":"+os.Getenv("PATH"))
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	sh := &shell{Process: nstest.Start(t, c), lines: make(chan string)}
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

// rest waits for the promised lines of background processes, and returns the missing ones.
func (s *shell) rest() []string {
	for late := time.After(60 * time.Second); len(s.pending) > 0; {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return s.pending
			}
			s.promised(line)
		case <-late:
			return s.pending
		}
	}
	return nil
}

// promised reports whether a background process promised the line, and removes it from the pending ones.
func (s *shell) promised(line string) bool {
	i := slices.Index(s.pending, line)
	if i >= 0 {
		s.pending = slices.Delete(s.pending, i, i+1)
	}
	return i >= 0
}

// background matches a statement that starts a process and does not wait for it.
var background = regexp.MustCompile(`&( \w+=\$!)?\s*$`)

// run types a statement and waits for its end and its promised output. It does not wait for the output of a background
// process, because a reader pastes whole blocks.
func (s *shell) run(x statement) error {
	if x.prints != "" && background.MatchString(x.text) {
		s.pending, x.prints = append(s.pending, x.prints), ""
	}
	const end = "the statement has ended with"
	text := patient.Replace(x.text) + "\nprintf '\\n%s %d\\n' '" + end + "' $?"
	s.Tell(text)
	var seen []string
	var again <-chan time.Time
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
				if s.promised(line) {
					continue
				}
				seen = append(seen, strings.TrimRight(line, " "))
				continue
			} else if status != "0" {
				return fmt.Errorf("status %s, and it printed\n%s", status, strings.Join(seen, "\n"))
			}
			if !ended {
				late = time.After(60 * time.Second)
			}
			if ended = true; strings.HasPrefix(x.text, "cat ") { // another process writes the file
				again = time.After(100 * time.Millisecond)
			}
		case <-again:
			s.Tell(text)
		case <-late:
			return fmt.Errorf("want %q; it printed\n%s", x.prints, strings.Join(seen, "\n"))
		}
	}
	if got := strings.TrimSpace(strings.Join(seen, "\n")); x.output != "" && got != strings.TrimSpace(x.output) {
		return fmt.Errorf("want\n%s\nit printed\n%s", x.output, got)
	}
	return nil
}
