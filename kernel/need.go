// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockfilter"
)

// ErrUnsupported says that this kernel or this user cannot do what was asked.
// The command line exits with 3 for it.
var ErrUnsupported = sockfilter.ErrUnsupported

// Need is a facility of the kernel that a feature uses.
type Need struct {
	Name     string       // as doctor prints it: "sk_lookup programs"
	Since    string       // first kernel that has it: "5.9"
	For      string       // what weir does with it
	Optional bool         // without it the feature works, with less; For says what is lost
	Remedy   string       // what to do where it is missing
	Probe    func() error // nil when it is there
}

// NeedError is a need that is not met.
type NeedError struct {
	Need Need
	Err  error
}

func (e *NeedError) Error() string {
	s := fmt.Sprintf("%s (Linux %s) is missing: %v", e.Need.Name, e.Need.Since, e.Err)
	if r := e.Need.RemedyFor(e.Err); r != "" {
		s += "; " + r
	}
	return s
}

// RemedyFor is what to do about a probe's error. Who lacks the right is told so
// by the probe; another kernel would not help.
func (n Need) RemedyFor(err error) string {
	if errors.Is(err, os.ErrPermission) {
		return ""
	}
	if s := scarce(err); s != "" {
		return s
	}
	return n.Remedy
}

// scarce says what to do about an error that tells nothing of the kernel's facilities.
func scarce(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "this process has no descriptor left: raise its limit (ulimit -n, LimitNOFILE=)"
	case errors.Is(err, unix.ENFILE):
		return "the host has no descriptor left: raise fs.file-max"
	case errors.Is(err, unix.ENOMEM):
		return "there is no memory left: see the limits of its cgroup"
	}
	return ""
}

// Scarce says that a probe failed for want of descriptors or memory: what it probes may be there.
func Scarce(err error) bool { return scarce(err) != "" }

// Unwrap makes errors.Is find ErrUnsupported and the probe's own error.
func (e *NeedError) Unwrap() []error { return []error{ErrUnsupported, e.Err} }

// Check probes a need.
func (n Need) Check() error {
	err := n.Probe()
	switch {
	case err == nil:
		return nil
	case scarce(err) != "":
		return fmt.Errorf("probing %s: %w: %s", n.Name, err, scarce(err)) // it is not known to be missing
	}
	return &NeedError{Need: n, Err: err}
}

// Require probes all needs that are not optional and returns what is missing.
func Require(needs []Need) error {
	var errs []error
	for _, n := range needs {
		if !n.Optional {
			errs = append(errs, n.Check())
		}
	}
	return errors.Join(errs...)
}

// NetnsCookie tells a namespace from a later one with the same inode number.
var NetnsCookie = Need{Name: "SO_NETNS_COOKIE", Since: "5.14", Optional: true,
	For: "telling a namespace from a later one of the same number; without it by its links alone",
	Probe: func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		_, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	}}

// ProbeProgram probes a type of programs.
func ProbeProgram(t ebpf.ProgramType) func() error {
	return func() error {
		LiftMemlock()
		return ExplainProbe(features.HaveProgramType(t))
	}
}

// ProbeMap probes a type of maps.
func ProbeMap(t ebpf.MapType) func() error {
	return func() error {
		LiftMemlock()
		return ExplainProbe(features.HaveMapType(t))
	}
}

// ExplainProbe names the rights that a refused probe lacks.
func ExplainProbe(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w: %s", os.ErrPermission, rightsLacking()) // libraries guess at other reasons
	}
	return err
}
