// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

var allNeeds = []Need{NetnsCookie, TCXLink, XDPProgram, ClsactFilter, NetfilterLink}

// mayMiss lists the needs missing in old kernels of the matrix, or without modules. All supported kernels have the other
// needs.
var mayMiss = map[string]string{NetnsCookie.Name: "5.14", TCXLink.Name: "6.6", NetfilterLink.Name: "6.4"}

func TestProbes(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range allNeeds {
		t.Run(n.Name, func(t *testing.T) {
			if n.Since == "" || n.For == "" {
				t.Errorf("%+v does not say since when or for what", n)
			}
			err := n.Check()
			if since, ok := mayMiss[n.Name]; ok && err != nil {
				t.Skip("need: kernel " + since + ": " + err.Error())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// playProbes prints the result of each need for this user.
func playProbes([]string) error {
	for _, n := range allNeeds {
		fmt.Printf("%s: %v\n", n.Name, n.Check())
	}
	_, err := Load(twoPrograms(), []string{"uses_a"}, nil)
	fmt.Printf("load: %v\n", err)
	_, err = OpenRoot("/sys/fs/bpf/nobody").Lock(context.Background())
	fmt.Printf("lock: %v %v\n", errors.Is(err, os.ErrPermission), err)
	return nil
}

// Without rights the answer names the missing rights. A newer kernel would not help.
func TestProbesWithoutRights(t *testing.T) {
	others(t)
	said := as(t, syscall.Credential{Uid: nobody, Gid: nobody}, "probe")
	for _, n := range []Need{XDPProgram, NetfilterLink} {
		if s := said[n.Name]; !strings.Contains(s, "run as root") || strings.Contains(s, "is missing") || strings.Contains(s, n.Remedy) && n.Remedy != "" {
			t.Errorf("%s: %q", n.Name, s)
		}
	}
	if s := said["load"]; !strings.Contains(s, "load uses_a") || !strings.Contains(s, "run as root") {
		t.Errorf("loading: %q", s)
	}
	if s := said["lock"]; !strings.HasPrefix(s, "true ") || !strings.Contains(s, "root") {
		t.Errorf("locking: %q", s)
	}
	if s := said[NetnsCookie.Name]; strings.Contains(s, "run as root") {
		t.Errorf("%s: %q, although it needs no rights", NetnsCookie.Name, s)
	}
}

func TestNeedError(t *testing.T) {
	cause := errors.New("no such program type")
	n := Need{Name: "sk_lookup programs", Since: "5.9", Remedy: "use a newer kernel", Probe: func() error { return cause }}
	err := n.Check()
	if !errors.Is(err, ErrUnsupported) || !errors.Is(err, cause) {
		t.Errorf("%v is not ErrUnsupported, or hides the cause", err)
	}
	if got, want := err.Error(), "sk_lookup programs (Linux 5.9) is missing: no such program type; use a newer kernel"; got != want {
		t.Errorf("says %q, want %q", got, want)
	}
	n.Probe = func() error { return &Lack{"cgroup2 is not mounted", "mount it"} }
	if got, want := n.Check().Error(), "sk_lookup programs (Linux 5.9) is missing: cgroup2 is not mounted; mount it"; got != want {
		t.Errorf("says %q, want %q", got, want)
	}
	n.Probe = func() error { return cause }
	there := Need{Name: "there", Probe: func() error { return nil }}
	optional := n
	optional.Name, optional.Optional = "optional", true
	if err := Require([]Need{there, optional}); err != nil {
		t.Errorf("what is optional is required: %v", err)
	}
	second := n
	second.Name = "second"
	err = Require([]Need{n, there, second})
	if err == nil || !strings.Contains(err.Error(), "sk_lookup programs") || !strings.Contains(err.Error(), "second") {
		t.Errorf("not all that is missing is named: %v", err)
	}
}
