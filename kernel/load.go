// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/weir-project/weir/internal/users"
)

// Collection holds the loaded maps and programs of an object by name.
type Collection = ebpf.Collection

// Load loads the named programs of an object, with their maps. share holds existing maps to use in place of new ones.
// Shared maps unused by the programs are ignored.
func Load(spec *ebpf.CollectionSpec, programs []string, share map[string]*ebpf.Map) (*Collection, error) {
	LiftMemlock()
	part := *spec // the library copies the programs and maps that it changes
	spec = &part
	spec.Programs, spec.Maps = maps.Clone(spec.Programs), maps.Clone(spec.Maps)
	keep := map[string]bool{}
	for _, p := range programs {
		if spec.Programs[p] == nil {
			return nil, fmt.Errorf("no program %s in the object", p)
		}
		keep[p] = true
	}
	for name := range spec.Programs {
		if !keep[name] {
			delete(spec.Programs, name)
		}
	}
	used := map[string]bool{}
	for _, p := range spec.Programs {
		for _, ins := range p.Instructions {
			if ref := ins.Reference(); ref != "" {
				used[ref] = true
			}
		}
	}
	for name := range spec.Maps {
		if !used[name] && !strings.HasPrefix(name, ".") {
			delete(spec.Maps, name)
		}
	}
	replace := map[string]*ebpf.Map{}
	for name, m := range share {
		if spec.Maps[name] != nil {
			replace[name] = m
		}
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replace})
	if err != nil {
		return nil, explainLoad("load "+strings.Join(programs, ", "), err)
	}
	return c, nil
}

// LiftMemlock removes the limit RLIMIT_MEMLOCK. Kernels before 5.11 charge BPF memory to it, and the default is small. A
// failure is harmless on later kernels.
func LiftMemlock() { _ = rlimit.RemoveMemlock() }

// explainLoad adds a remedy to the kernel's error.
func explainLoad(what string, err error) error {
	var ve *ebpf.VerifierError
	switch {
	case scarce(err) != "": // also as the cause of a verifier error
		return fmt.Errorf("%s: %w: %s", what, err, scarce(err))
	case errors.As(err, &ve):
		return fmt.Errorf("%s: rejected by the kernel's verifier: %w (weir doctor shows what this kernel supports)", what, err)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s: %w: %s", what, err, users.LackingForBPF())
	}
	return fmt.Errorf("%s: %w", what, err)
}

// ObjectHash returns the SHA-256 of a BPF object, as stored in meta.
func ObjectHash(elf []byte) [sha256.Size]byte { return sha256.Sum256(elf) }
