// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/demo"
	"github.com/weir-project/weir/lab/peers"
)

func TestMain(m *testing.M) {
	lab.Enter()
	peers.Sink()
	nstest.Play(map[string]nstest.Role{"weir-lab": func([]string) error { main(); return nil }})
	nstest.Main(m)
}

func command(args ...string) *exec.Cmd {
	cmd := nstest.Child("weir-lab")
	cmd.Args = append(cmd.Args, args...)
	return cmd
}

func status(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"list", 0, "telemetry        routers' IPFIX and BMP steered"},
		{"list --names", 0, "dispatch\nfilter\nguard\nhandoff\nhandoff-balance\nhandoff-compare\nhandoff-crash\nhandoff-pair\nloaders\nreload\nreroute\nreroute-cost\nreroute-stress\nsteer-compare\nsteer-storm\ntable\ntelemetry\ntilfa\n"},
		{"list x", 2, "unknown command"},
		{"run", 2, "accepts 1 arg"},
		{"run nothing", 2, `unknown experiment "nothing"; known: [dispatch filter guard handoff handoff-balance handoff-compare handoff-crash handoff-pair loaders reload reroute reroute-cost reroute-stress steer-compare steer-storm table telemetry tilfa]`},
		{"run telemetry --slow", 2, "unknown flag: --slow"},
		{"run telemetry --quick --smoke", 2, "choose one"},
		{"nonsense", 2, "unknown command"},
	} {
		out, err := command(strings.Fields(c.args)...).CombinedOutput()
		if got := status(err); got != c.status || !strings.Contains(string(out), c.says) {
			t.Errorf("weir-lab %s: status %d, want %d, and %q in\n%s", c.args, got, c.status, c.says, out)
		}
	}
}

// Without root the lab exits with its own status and prints a remedy.
func TestNotRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root, to become someone else")
	}
	cmd := command("run", "telemetry", "--smoke")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if status(err) != exitCannot || !strings.Contains(string(out), "sudo") {
		t.Errorf("status %d: %s", status(err), out)
	}
}

// This runs the whole experiment without peers: built-in collectors and simulated routers. CI's own runs of
// the lab cover the real ones.
func TestRunWithoutPeers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "-C", "../../..", "build", "-o", weir, "./cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("build weir: %v\n%s", err, out)
	}
	kept := filepath.Join(t.TempDir(), "kept")
	cmd := command("run", "telemetry", "--smoke", "--json", "--seed", "7", "--keep", kept)
	cmd.Env = append(cmd.Env, "WEIR="+weir, lab.WithoutVar+"=nfacctd,bgpd,pmacctd,softflowd")
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	var r lab.Result
	if jsonErr := json.Unmarshal(out, &r); err != nil || jsonErr != nil || !r.OK {
		t.Fatalf("status %d, %v\n%s\n%s", status(err), jsonErr, out, said.String())
	}
	if len(r.Skipped) != 2 || r.Metrics["real_routers"] != 0 || r.Metrics["restarts"] < 2 || r.Metrics["interrupted_runs"] != 1 || r.Seed != 7 {
		t.Errorf("%s", out)
	}
	if _, err := os.Stat(filepath.Join(kept, "weir.yaml")); err != nil {
		t.Error(err)
	}
}

// Ctrl-C ends the run soon at any moment and leaves nothing behind. The telemetry experiment interrupts
// itself when everything is up; these are earlier moments.
func TestInterrupt(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	if _, err := lab.Find("nfacctd"); err != nil {
		t.Skip("need: tool nfacctd (Debian package pmacct)")
	}
	for _, after := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			if !interrupt(t, after, command("run", "telemetry", "--smoke", "--json")) {
				t.Error("the interrupted run exited with 0")
			}
		})
	}
}

// A demonstration ends as soon. The moments are parts of a whole run's time on this machine: the later ones have several
// weir serve and live sessions.
func TestInterruptDemo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	weir := buildWeir(t)
	demo := func() *exec.Cmd {
		cmd := alone(command("demo", "drain"))
		cmd.Env = append(cmd.Env, "WEIR="+weir)
		return cmd
	}
	start := time.Now()
	if out, err := demo().CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	whole := time.Since(start)
	for _, percent := range []time.Duration{10, 40, 70} {
		t.Run(fmt.Sprintf("%d%%", percent), func(t *testing.T) {
			before := present(t)
			for after := whole * percent / 100; !interrupt(t, after, demo()); after = after * 3 / 4 {
				if after < 50*time.Millisecond {
					t.Fatalf("it ended before each interrupt; a whole run took %s", whole)
				}
			}
			nothingNew(t, before)
		})
	}
}

// After its end a demonstration has left nothing on the machine: no socket of an agent, no helper namespace.
func TestDemoLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	weir := buildWeir(t)
	for name, tool := range map[string]string{"drain": "ip", "reroute": "bfdd"} {
		t.Run(name, func(t *testing.T) {
			if _, err := lab.Find(tool); err != nil {
				t.Skip("need: tool", tool)
			}
			cmd := alone(command("demo", name, "--smoke"))
			cmd.Env = append(cmd.Env, "WEIR="+weir)
			before := present(t)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			nothingNew(t, before)
		})
	}
}

func buildWeir(t *testing.T) string {
	t.Helper()
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "-C", "../../..", "build", "-o", weir, "./cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("build weir: %v\n%s", err, out)
	}
	return weir
}

// alone makes a run treat the test's mount namespace as the machine.
func alone(cmd *exec.Cmd) *exec.Cmd {
	cmd.Env = slices.DeleteFunc(cmd.Env, func(v string) bool { return strings.HasPrefix(v, lab.OwnMark+"=") })
	return cmd
}

// present lists the names in the directories of weir, of namespaces and of pins on the test's machine. Earlier tests may
// have left the directory of records.
func present(t *testing.T) (out []string) {
	t.Helper()
	for _, dir := range []string{"/run/weir", "/run/netns", nstest.BPFFS} {
		names, err := filepath.Glob(dir + "/*")
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, names...)
	}
	return out
}

func nothingNew(t *testing.T, before []string) {
	t.Helper()
	left := slices.DeleteFunc(present(t), func(path string) bool { return slices.Contains(before, path) })
	if len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// interrupt starts a run, interrupts it after a while, and checks its end. It returns false if the run had succeeded before.
func interrupt(t *testing.T, after time.Duration, cmd *exec.Cmd) bool {
	t.Helper()
	var out bytes.Buffer
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(after)
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	begin, stalls := time.Now(), lab.WatchStalls()
	err := cmd.Wait()
	took := time.Since(begin)
	_, _, stall := stalls.Stop()
	// A stalled machine excuses a slow end.
	if took > 15*time.Second && stall < 200*time.Millisecond || took > time.Minute {
		t.Errorf("it took %s to end; longest stall of the machine %s", took, stall)
	}
	if left := lab.RunLeftovers(cmd.Process.Pid); len(left) > 0 {
		t.Errorf("left behind: %v\n%s", left, out.String())
	}
	return status(err) != 0
}

// Sections of experiments without a new run stay unchanged, to the letter.
func TestSections(t *testing.T) {
	page := "# Results\n\nWritten.\n\n## a\n\ntext\n\n![a](a.svg)\n\n## b\n\nmore\n"
	got := sections(page)
	if len(got) != 2 || got["a"] != "\n## a\n\ntext\n\n![a](a.svg)\n" || got["b"] != "\n## b\n\nmore\n" {
		t.Errorf("%q", got)
	}
	written, err := os.ReadFile("../../../docs/RESULTS.md")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.SplitN(string(written), "\n## ", 2)[0]
	for _, x := range lab.Experiments() {
		all += sections(string(written))[x.Name]
	}
	if all != string(written) {
		t.Error("joined sections differ from docs/RESULTS.md")
	}
}

// demo lists the demonstrations, and shows one in a pipe and before a recorder.
func TestDemo(t *testing.T) {
	out, err := command("demo").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "steer      every client keeps its own server") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = command("demo", "nothing").CombinedOutput()
	if status(err) != exitUsage || !strings.Contains(string(out), `unknown demonstration "nothing"; known: telemetry, `) {
		t.Errorf("status %d: %s", status(err), out)
	}
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	weir := buildWeir(t)
	dir := filepath.Join(t.TempDir(), "recordings")
	cmd := command("demo", "plan", "--smoke", "--record", dir)
	cmd.Env = append(cmd.Env, "WEIR="+weir)
	if out, err = cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"$ weir reroute plan -f abilene.yaml", "✓ every link failure", "0 objects left behind"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
	for _, name := range []string{"plan.cast", "plan.svg", "plan-repair.svg"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() == 0 || st.Size() > 60<<10 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The last lines of a demonstration fit 80 columns.
func TestSummaryColumns(t *testing.T) {
	long := strings.Repeat("words ", 30)
	for _, d := range demo.All() {
		for line := range strings.Lines(summaryText(d, []string{long, "  " + long}, 80)) {
			if n := utf8.RuneCountInString(line) - 1; n > 80 {
				t.Errorf("%s: %d columns: %s", d.Name, n, line)
			}
		}
	}
}
