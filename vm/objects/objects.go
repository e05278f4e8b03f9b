// SPDX-License-Identifier: Apache-2.0

// Package objects lists the generated BPF objects of the product, and the uses of their programs. Its test loads them
// on the running kernel. vm/kerneltable makes a table from the results.
package objects

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/kernel"
)

// Job is one use of an object: programs loaded together.
type Job struct {
	Name     string   // unique
	Object   string   // path of the object's source without ".bpf.c"; empty: a program compiled at run time
	Programs []string // all of the object's programs if it is an image
	Needs    []kernel.Need
	Spec     func() (*ebpf.CollectionSpec, error)
	Open     func() (close func(), err error) // loads the programs if Spec is nil
}

// Results of a job.
const (
	Loaded  = "loaded"
	Missing = "missing" // the product does not use the job on this kernel
	Failed  = "failed"  // the kernel refuses it, although the product would use it
)

// Attribute is the attribute of a test (testing.T.Attr) with a Result in JSON.
const Attribute = "object"

// Result is the result of a job on a kernel.
type Result struct {
	Job     string   `json:"job"`
	Object  string   `json:"object,omitempty"`
	Result  string   `json:"result"`
	Missing []Missed `json:"missing,omitempty"`
	Err     string   `json:"err,omitempty"`
}

// Missed is a missing need.
type Missed struct {
	Need  string `json:"need"`
	Since string `json:"since,omitempty"` // first kernel version with it
}

// Run probes the job's needs and loads its programs. It does not load them if a need is missing, because the product
// does not either.
func (j Job) Run() (Result, error) {
	r := Result{Job: j.Name, Object: j.Object, Result: Loaded}
	var errs []error
	for _, n := range j.Needs {
		var missing *kernel.NeedError
		switch err := n.Check(); {
		case errors.As(err, &missing):
			r.Result = Missing
			r.Missing = append(r.Missing, Missed{n.Name, n.Since})
			errs = append(errs, err)
		case err != nil:
			r.Result, r.Err = Failed, err.Error()
			return r, err
		}
	}
	if r.Result == Missing {
		return r, errors.Join(errs...)
	}
	if err := j.load(); err != nil {
		r.Result = Failed
		r.Err, _, _ = strings.Cut(err.Error(), "\n") // the verifier's log follows
		return r, err
	}
	return r, nil
}

func (j Job) load() error {
	if j.Open != nil {
		done, err := j.Open()
		if err == nil {
			done()
		}
		return err
	}
	spec, err := j.Spec()
	if err != nil {
		return err
	}
	c, err := kernel.Load(spec, j.Programs, nil)
	if v, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		return fmt.Errorf("%w\n%-10v", err, v)
	} else if err != nil {
		return err
	}
	c.Close()
	return nil
}

// required returns the needs that are not optional.
func required(needs ...kernel.Need) (out []kernel.Need) {
	for _, n := range needs {
		if !n.Optional {
			out = append(out, n)
		}
	}
	return out
}
