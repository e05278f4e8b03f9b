// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"probe": playProbes, "inner": playInner})
	nstest.Main(m)
}

// always are the needs available on all supported kernels.
var always = []kernel.Need{SkLookup, SockMap, ExitTracepoint, SocketTracepoint, RingBuffer, PostBind, PidfdGetfd, SockDiag, CgroupIngress, PacketFilter, TCFilter}

func TestProbes(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range always {
		t.Run(n.Name, func(t *testing.T) {
			if n.Since == "" || n.For == "" {
				t.Errorf("%+v does not say since when or for what", n)
			}
			if err := n.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// playProbes prints the result of each need for a user without rights.
func playProbes([]string) error {
	if err := unix.Setresuid(65534, 65534, 65534); err != nil {
		return err
	}
	for _, n := range always {
		fmt.Printf("%s: %v\n", n.Name, n.Check())
	}
	return nil
}

// Without rights the answer names the missing rights. A newer kernel would not help.
func TestProbesWithoutRights(t *testing.T) {
	nstest.NeedRoot(t)
	out, err := nstest.Child("probe").Output()
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), ": ")
		said[name] = text
	}
	for _, n := range []kernel.Need{SkLookup, SockMap, ExitTracepoint, SocketTracepoint, RingBuffer, PostBind} {
		if s := said[n.Name]; !strings.Contains(s, "run as root") || strings.Contains(s, n.Remedy) && n.Remedy != "" {
			t.Errorf("%s: %q", n.Name, s)
		}
	}
	for _, n := range []kernel.Need{PidfdGetfd, SockDiag} {
		if said[n.Name] != "<nil>" {
			t.Errorf("%s: %q, although it needs no rights", n.Name, said[n.Name])
		}
	}
}

// Without cgroup2, or in a pid namespace of its own, the remedy names exactly this. Another kernel would not help.
func TestRemedyOfTheCause(t *testing.T) {
	nstest.Enter(t)
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " - cgroup2 ") {
			if err := unix.Unmount(strings.Fields(line)[4], unix.MNT_DETACH); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, n := range []kernel.Need{BindShare, PostBind, CgroupIngress} {
		err := n.Probe()
		if r := n.RemedyFor(err); err == nil || !strings.HasPrefix(r, "mount -t cgroup2 ") || strings.Contains(r, "kernel") {
			t.Errorf("%s: %v: %q", n.Name, err, r)
		}
	}
	c := nstest.Child("inner")
	c.SysProcAttr.Cloneflags = unix.CLONE_NEWPID
	out, err := c.Output()
	if err != nil || string(out) != "run weir outside containers\n" {
		t.Errorf("in a pid namespace: %q, %v", out, err)
	}
}

// playInner prints the remedy of a need of the initial pid namespace.
func playInner([]string) error {
	_, err := fmt.Println(ExitTracepoint.RemedyFor(ExitTracepoint.Probe()))
	return err
}
