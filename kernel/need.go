// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
)

// ErrUnsupported says that this kernel or this user cannot do what was asked.
// The command line exits with 3 for it.
var ErrUnsupported = errors.New("this kernel or user cannot do that")

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
	return n.Remedy
}

// Unwrap makes errors.Is find ErrUnsupported and the probe's own error.
func (e *NeedError) Unwrap() []error { return []error{ErrUnsupported, e.Err} }

// Check probes a need.
func (n Need) Check() error {
	if err := n.Probe(); err != nil {
		return &NeedError{Need: n, Err: err}
	}
	return nil
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
