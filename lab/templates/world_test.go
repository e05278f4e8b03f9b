// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab"
)

// collector is a real collector with its restarts.
type collector struct {
	t       *testing.T
	env     *lab.Env
	ns      string
	name    string
	listen  string // as in weir.yaml
	port    int
	dir     string
	life    int
	proc    *lab.Process
	args    func(c *collector) (program string, args []string)
	read    func(c *collector) []string // lines "192.0.2.EXPORTER PORT"
	flushes bool                        // writes periodically, and not at its end
	bye     syscall.Signal              // signal to end it
	gapLine *regexp.Regexp
}

func (c *collector) here() string    { return filepath.Join(c.dir, strconv.Itoa(c.life)) }
func (c *collector) pidfile() string { return filepath.Join(c.dir, "pid") }

func (c *collector) start() {
	c.t.Helper()
	c.life++
	check(c.t, os.MkdirAll(c.here(), 0o777))
	log, err := os.Create(filepath.Join(c.here(), "log"))
	check(c.t, err)
	defer log.Close()
	program, args := c.args(c)
	c.proc, err = c.env.Start(lab.Command{Namespace: c.ns, Path: program, Args: args, Dir: c.here(), Output: log})
	check(c.t, err)
	check(c.t, os.WriteFile(c.pidfile(), fmt.Appendln(nil, c.proc.PID), 0o644))
}

func (c *collector) end(sig syscall.Signal) {
	c.t.Helper()
	check(c.t, c.proc.Signal(sig))
	select {
	case <-c.proc.Done():
	case <-time.After(60 * time.Second):
		c.t.Fatalf("%s did not end", c.name)
	}
}

func (c *collector) log() string {
	b, _ := os.ReadFile(filepath.Join(c.here(), "log"))
	return string(b)
}

// gaps counts the missing records reported by the collector.
func (c *collector) gaps() (n int) {
	for _, m := range c.gapLine.FindAllStringSubmatch(c.log(), -1) {
		if len(m) > 1 {
			k, _ := strconv.Atoi(m[1])
			n += k
		} else {
			n++
		}
	}
	return n
}

// record is one data record: its exporter's number and its own.
type record struct{ exporter, n int }

// decoded ends the collector after it has processed all datagrams, and returns the records decoded in this
// life. It waits for the records in want to be written.
func (c *collector) decoded(want map[record]bool) map[record]bool {
	c.t.Helper()
	waits := func(done func() bool) { // the caller detects missing records
		_ = nstest.Poll(30*time.Second, func() error {
			if !done() {
				return errors.New("not yet")
			}
			return nil
		})
	}
	waits(c.hasRead)
	if c.flushes {
		waits(func() bool {
			all := c.records()
			for r := range want {
				if !all[r] {
					return false
				}
			}
			return true
		})
	}
	c.end(c.bye)
	return c.records()
}

// hasRead reports whether the collector has read all received datagrams.
func (c *collector) hasRead() (all bool) {
	c.t.Helper()
	ns, err := netns.Open(c.ns)
	check(c.t, err)
	defer ns.Close()
	check(c.t, ns.Do(func() error {
		sockets, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: uint16(c.port)})
		all = !slices.ContainsFunc(sockets, func(s sockdiag.Socket) bool { return s.RecvQueue > 0 })
		return err
	}))
	return all
}

// records returns the records written in this life.
func (c *collector) records() map[record]bool {
	all := map[record]bool{}
	for _, line := range c.read(c) {
		var r record
		if _, err := fmt.Sscanf(line, "192.0.2.%d %d", &r.exporter, &r.n); err == nil {
			all[r] = true
		}
	}
	return all
}

// newNfacctd returns pmacct's collector: both families on one port.
func newNfacctd(t *testing.T, e *lab.Env, ns string, port int) *collector {
	c := &collector{t: t, env: e, ns: ns, name: "nfacctd", listen: fmt.Sprintf("udp :%d", port), port: port,
		dir: filepath.Join(e.Dir, "nfacctd"), flushes: true, bye: syscall.SIGKILL, gapLine: regexp.MustCompile(`expecting flow`)}
	c.args = func(c *collector) (string, []string) {
		conf := filepath.Join(c.here(), "conf")
		check(t, os.WriteFile(conf, fmt.Appendf(nil, `daemonize: false
nfacctd_port: %d
nfacctd_time_new: true
nfacctd_disable_checks: false
nfacctd_pipe_size: 4194304
plugins: print[p]
aggregate[p]: src_host, src_port
plugin_pipe_zmq[p]: true
print_refresh_time[p]: 1
print_output[p]: json
print_output_file[p]: %s
print_output_file_append[p]: true
`, c.port, filepath.Join(c.here(), "flows")), 0o644))
		return "nfacctd", []string{"-f", conf}
	}
	c.read = func(c *collector) (lines []string) {
		b, _ := os.ReadFile(filepath.Join(c.here(), "flows"))
		for line := range bytes.Lines(b) {
			var v struct {
				Source string `json:"ip_src"`
				Port   int    `json:"port_src"`
			}
			if json.Unmarshal(line, &v) == nil {
				lines = append(lines, fmt.Sprintf("%s %d", v.Source, v.Port))
			}
		}
		return lines
	}
	return c
}

// newNfcapd returns nfdump's collector, of one family.
func newNfcapd(t *testing.T, e *lab.Env, ns string, port int, family string) *collector {
	c := &collector{t: t, env: e, ns: ns, name: "nfcapd" + family, listen: fmt.Sprintf("udp%s :%d", family[1:], port), port: port,
		dir: filepath.Join(e.Dir, "nfcapd"+family), bye: syscall.SIGTERM, gapLine: regexp.MustCompile(`Sequence Errors: (\d+)`)}
	c.args = func(c *collector) (string, []string) {
		flows := filepath.Join(c.here(), "flows")
		check(t, os.MkdirAll(flows, 0o777))
		return "nfcapd", []string{family, "-p", strconv.Itoa(c.port), "-w", flows, "-t", "3600", "-B", "4194304"}
	}
	c.read = func(c *collector) []string {
		out, err := exec.Command("nfdump", "-R", filepath.Join(c.here(), "flows"), "-q", "-o", "fmt:%sa %sp").CombinedOutput()
		if err != nil {
			t.Errorf("nfdump: %v: %s", err, out)
		}
		var lines []string
		for line := range strings.Lines(string(out)) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return lines
	}
	return c
}

// weir runs weir like a user.
type weir struct {
	t   *testing.T
	env *lab.Env
	log string // of weir serve
}

func newWeir(t *testing.T, e *lab.Env, ns string, collectors []*collector) *weir {
	w := &weir{t, e, filepath.Join(e.Dir, "serve.log")}
	var b strings.Builder
	b.WriteString("services:\n")
	for _, c := range collectors {
		check(t, os.MkdirAll(c.dir, 0o777))
		fmt.Fprintf(&b, "  %s:\n    listen: [%q]\n    netns: %s\n    members: [{slot: 0, pidfile: %s}]\n", c.name, c.listen, ns, c.pidfile())
	}
	config := filepath.Join(e.Dir, "weir.yaml")
	check(t, os.WriteFile(config, []byte(b.String()), 0o644))
	w.run("apply", "-f", config)
	log, err := os.Create(w.log)
	check(t, err)
	defer log.Close()
	binary, err := e.Weir()
	check(t, err)
	_, err = e.Start(lab.Command{Path: binary, Args: []string{"--root", e.Root, "--socket", "", "serve", "--listen", ""}, Output: log})
	check(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("weir serve log:\n%s", b)
		}
	})
	nstest.Until(w.t, "listening for templates", func() bool {
		b, err := os.ReadFile(w.log)
		return err == nil && bytes.Contains(b, []byte("listening for templates"))
	})
	return w
}

func (w *weir) run(args ...string) []byte {
	w.t.Helper()
	binary, err := w.env.Weir()
	check(w.t, err)
	cmd := exec.Command(binary, append([]string{"--root", w.env.Root}, args...)...)
	out, err := cmd.Output()
	if err != nil {
		w.t.Fatalf("weir %v: %v: %s", args, err, out)
	}
	return out
}

// admitted waits until every collector has its slot, and returns the time of the first one.
func (w *weir) admitted(collectors []*collector) time.Time {
	w.t.Helper()
	first := time.Time{}
	nstest.Until(w.t, "every collector admitted", func() bool {
		var st struct {
			Services []struct {
				Name  string
				Slots []struct {
					State string
					PID   int
					Since time.Time
				}
			}
		}
		check(w.t, json.Unmarshal(w.run("steer", "status", "--json"), &st))
		n := 0
		first = time.Time{}
		for _, s := range st.Services {
			for _, c := range collectors {
				if c.name == s.Name && s.Slots[0].State == "admitted" && s.Slots[0].PID == c.proc.PID {
					n++
					if first.Before(s.Slots[0].Since) {
						first = s.Slots[0].Since
					}
				}
			}
		}
		return n == len(collectors)
	})
	return first
}

type templateState struct {
	Exporters []struct{ Replays int }
	Replayed  int
}

func (w *weir) templates(c *collector) (st templateState) {
	w.t.Helper()
	check(w.t, json.Unmarshal(w.run("steer", "templates", "--json", c.name), &st))
	return st
}

// remembered waits until the templates of this number of exporters are known.
func (w *weir) remembered(collectors []*collector, exporters int) {
	w.t.Helper()
	nstest.Until(w.t, "every exporter's templates known", func() bool {
		n := 0
		for _, c := range collectors {
			n += len(w.templates(c).Exporters)
		}
		return n == exporters
	})
}

func (w *weir) replays(collectors []*collector) (n int) {
	for _, c := range collectors {
		for _, x := range w.templates(c).Exporters {
			n += x.Replays
		}
	}
	return n
}

// replayed waits until exporters replays have followed the first before.
func (w *weir) replayed(collectors []*collector, before, exporters int) {
	w.t.Helper()
	nstest.Until(w.t, "every exporter's templates replayed", func() bool { return w.replays(collectors) >= before+exporters })
}
