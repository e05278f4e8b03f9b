// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"

	"github.com/weir-project/weir/internal/safefile"
)

// maxFile is the largest input, in bytes. A database of ten thousand routers is far smaller.
const maxFile = 256 << 20

// ReadFile reads a network from a file in any format.
func ReadFile(path string) (*Network, error) {
	name, data, err := safefile.Input(path, maxFile)
	if err != nil {
		return nil, err
	}
	return Read(name, data)
}

// Read detects the format of data and reads it. file is for errors.
func Read(file string, data []byte) (*Network, error) {
	n, err := detectForm(data)(file, data)
	if err != nil {
		return nil, err
	}
	if n.Name == "" {
		n.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	}
	return n, nil
}

type form func(file string, data []byte) (*Network, error)

func detectForm(data []byte) form {
	text := bytes.TrimLeft(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")), " \t\r\n")
	switch {
	case bytes.HasPrefix(text, []byte("<")):
		return readGraphML
	case bytes.HasPrefix(text, []byte("{")):
		return jsonForm(text)
	case bytes.Contains(data, []byte("IS-IS Level-")):
		return readISIS
	}
	return readOwn
}

// jsonForm detects the format of JSON by its keys. The default is weir's own format, with positions in its errors.
func jsonForm(text []byte) form {
	var keys struct {
		Areas, Vrfs            json.RawMessage
		AreaScopedLinkStateDb  json.RawMessage
		Edges, Directed, Graph json.RawMessage
		Links                  []struct{ Source, Target json.RawMessage }
	}
	// An unexpected type does not affect the other fields.
	_ = json.NewDecoder(bytes.NewReader(text)).Decode(&keys)
	switch {
	case keys.AreaScopedLinkStateDb != nil:
		return readOSPF6
	case keys.Areas != nil || keys.Vrfs != nil:
		return refuseISISJSON
	case keys.Edges != nil || keys.Directed != nil || keys.Graph != nil || len(keys.Links) > 0 && keys.Links[0].Source != nil:
		return readNodeLink
	}
	return readOwn
}
